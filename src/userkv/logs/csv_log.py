"""Common part of the two comma-separated logs: columns found by name in the header, numbers checked strictly."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass

from userkv.core.errors import InvalidInputFileError
from userkv.logs.events import BadLines, BadValueError, Event, item_id, seconds, user_name

# Stricter than int() and float(), which also take "1_000", "inf" and digits of other scripts.
_INTEGER = re.compile(r"-?[0-9]{1,30}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CsvLog:
    """Where a log keeps user, item and time, and how many of its time units make a second.

    numeric: further columns that have to be there and hold numbers; events carry those that are also in ``signals``.
    """

    user: str
    item: str
    time: str
    units_per_second: float
    numeric: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that the header must have."""
        return (self.user, self.item, self.time, *self.numeric)

    def matches(self, first_line: str) -> bool:
        """Whether this header has every column of the log."""
        try:
            return set(self.columns) <= set(_split(first_line))
        except BadValueError:
            return False

    def read(self, lines: Iterator[tuple[int, str]], bad: BadLines) -> Iterator[Event]:
        """Yields the events in file order. A wrong header always raises: without it no line can be read."""
        number, header_line = next(lines, (1, ""))
        try:
            header = _split(header_line)
        except BadValueError as reason:
            raise InvalidInputFileError(f"{bad.path}, line {number}: {reason}.") from reason
        missing = [name for name in self.columns if name not in header]
        if missing:
            raise InvalidInputFileError(f"{bad.path}, line {number}: the header lacks the column {', '.join(missing)}.")
        user, item, time = header.index(self.user), header.index(self.item), header.index(self.time)
        numeric = [header.index(name) for name in self.numeric]
        for number, text in lines:
            try:
                fields = _split(text)
                if len(fields) != len(header):
                    raise BadValueError(f"{len(fields)} fields where the header has {len(header)}")
                numbers = {header[column]: _number(fields[column], header[column]) for column in numeric}
                event = Event(
                    user_name(_not_negative(fields[user], self.user), self.user),
                    seconds(_number(fields[time], self.time), self.time, self.units_per_second),
                    item_id(_integer(fields[item], self.item), self.item),
                    tuple(numbers[name] for name in self.signals),
                )
            except BadValueError as reason:
                bad.report(number, str(reason))
            else:
                yield event


def _split(text: str) -> list[str]:
    try:
        fields = next(csv.reader([text], strict=True)) if '"' in text else text.split(",")
    except csv.Error as error:
        raise BadValueError(f"not comma-separated fields ({error})") from error
    return [field.strip() for field in fields]


def _not_negative(text: str, what: str) -> str:
    if _INTEGER.fullmatch(text) and int(text) < 0:
        raise BadValueError(f"{what} is negative ({text})")
    return text


def _integer(text: str, what: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise BadValueError(f"{what} must be an integer, not {text[:40]!r}")
    return int(text)


def _number(text: str, what: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise BadValueError(f"{what} must be a number, not {text[:40]!r}")
    return float(text)
