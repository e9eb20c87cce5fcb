"""Readers of public recommendation logs, by name, and the recognition of their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from userkv.core.errors import InvalidSettingError
from userkv.logs.events import BadLines, Event, read_lines
from userkv.logs.kuairand import KUAIRAND
from userkv.logs.otto import OTTO
from userkv.logs.ratings import RATINGS


class Source(Protocol):
    """A log format: recognises its first line, and turns numbered lines into events."""

    def matches(self, first_line: str) -> bool:
        """Whether a file that starts with this line has this format."""

    def read(self, lines: Iterator[tuple[int, str]], bad: BadLines) -> Iterator[Event]:
        """Yields the events in file order; malformed lines go to ``bad``, which raises or counts."""


SOURCES: Mapping[str, Source] = {"otto": OTTO, "ratings": RATINGS, "kuairand": KUAIRAND}
"""All log formats by the name that ``--format`` takes."""


def read_events(path: Path, source: str, *, skip_bad: bool = False) -> tuple[list[Event], BadLines]:
    """All events of a log file in file order, and the lines that were skipped.

    Raises InvalidSettingError for an unknown source name, InvalidInputFileError for a file that cannot be read or,
    unless ``skip_bad``, has a malformed line.
    """
    if source not in SOURCES:
        raise InvalidSettingError(f"Unknown log format {source!r}: use one of {', '.join(SOURCES)}.")
    bad = BadLines(str(path), skip_bad)
    return list(SOURCES[source].read(read_lines(path, bad), bad)), bad
