"""Recognises what kind of input a file is from its first line."""

from __future__ import annotations

from pathlib import Path

from userkv.core.errors import InvalidInputFileError
from userkv.logs.events import BadLines, read_lines
from userkv.logs.formats import SOURCES
from userkv.logs.workload_file import is_workload_header

WORKLOAD = "workload"
FORMATS = (*SOURCES, WORKLOAD)
"""The names that ``--format`` takes."""


def detect_format(path: Path) -> str:
    """One of FORMATS. Raises InvalidInputFileError if the first line with text fits none of them, or is missing."""
    # The policy is strict here whatever the caller's: a first line that cannot be decoded tells nothing.
    _, first_line = next(read_lines(path, BadLines(str(path))), (0, None))
    if first_line is None:
        raise InvalidInputFileError(f"{path} is empty.")
    if is_workload_header(first_line):
        return WORKLOAD
    for name, source in SOURCES.items():
        if source.matches(first_line):
            return name
    raise InvalidInputFileError(
        f"{path}, line 1: it fits none of the known formats, so say which it is with --format ({', '.join(FORMATS)})."
    )
