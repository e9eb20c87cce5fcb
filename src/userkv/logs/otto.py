"""OTTO sessions: one JSON object a line, ``{"session": 7, "events": [{"aid": 1, "ts": <ms>, "type": "clicks"}]}``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from userkv.logs.events import BadLines, BadValueError, Event, item_id, seconds, user_name
from userkv.logs.json_lines import json_object, required, required_list

TYPES = ("clicks", "carts", "orders")
"""Of an event."""


@dataclass(frozen=True, slots=True)
class OttoLog:
    """The reader of this format; a session is a user. types: whether events carry their type as their signal."""

    types: bool = False

    def matches(self, first_line: str) -> bool:
        """Whether this is a JSON object with a session and its events."""
        try:
            return {"session", "events"} <= json_object(first_line).keys()
        except BadValueError:
            return False

    def read(self, lines: Iterator[tuple[int, str]], bad: BadLines) -> Iterator[Event]:
        """Yields the events in file order; a line with one malformed event is malformed as a whole."""
        for number, text in lines:
            try:
                events = _session(text, self.types)
            except BadValueError as reason:
                bad.report(number, str(reason))
            else:
                yield from events


def _session(text: str, types: bool) -> list[Event]:
    record = json_object(text)
    user = user_name(required(record, "session"), "session")
    events = []
    for index, event in enumerate(required_list(record, "events")):
        if not isinstance(event, dict):
            raise BadValueError(f"event {index} is not a JSON object")
        try:
            time = seconds(required(event, "ts"), "ts", units_per_second=1000.0)
            item = item_id(required(event, "aid"), "aid")
            signals = (_type(required(event, "type")),) if types else ()
        except BadValueError as reason:
            raise BadValueError(f"event {index}: {reason}") from reason
        events.append(Event(user, time, item, signals))
    return events


def _type(value: Any) -> str:
    if value not in TYPES:
        raise BadValueError(f"type must be one of {', '.join(TYPES)}, not {str(value)[:40]!r}")
    return str(value)


OTTO = OttoLog()
