"""What happened: one user touched one item at one time. Plus the common treatment of lines that cannot be read."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from userkv.core.errors import InvalidInputFileError
from userkv.core.request import MAX_USER_ID_BYTES

MAX_ITEM = 2**63 - 1
"""Largest item id that is read (64 bits, signed)."""

_GZIP_MAGIC = b"\x1f\x8b"
_KEPT_EXAMPLES = 5


class Event(NamedTuple):
    """One interaction.

    user: any non-blank name; time: seconds since the epoch; item: non-negative item id. signals: what else the log
    says about it, for training (a rating, a click); empty unless the reader was asked for it.
    """

    user: str
    time: float
    item: int
    signals: tuple[float | str, ...] = ()


class BadValueError(ValueError):
    """Why one line cannot be used; the reader of the file adds file name and line number."""


@dataclass(slots=True)
class BadLines:
    """What to do with malformed lines, and what was done.

    path: the file, for messages. skip: count and skip instead of raising. count: lines skipped so far.
    examples: the first few of them as (line number, reason).
    """

    path: str
    skip: bool = False
    count: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def report(self, line: int, reason: str) -> None:
        """Counts the line, or raises InvalidInputFileError with file, line number and reason."""
        if not self.skip:
            raise InvalidInputFileError(f"{self.path}, line {line}: {reason}.")
        self.count += 1
        if len(self.examples) < _KEPT_EXAMPLES:
            self.examples.append((line, reason))


def read_lines(path: Path, bad: BadLines) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text without line end) of a plain or gzip file; blank lines are left out.

    A line that is no UTF-8 goes to ``bad``. Raises InvalidInputFileError if the file cannot be opened or unpacked.
    """
    number = 0
    try:
        with path.open("rb") as plain:
            zipped = plain.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            plain.seek(0)
            with gzip.open(plain, "rb") if zipped else plain as stream:
                for raw in stream:
                    number += 1
                    try:
                        # Spreadsheet programs put a byte order mark in front; it is no part of the first field.
                        text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                    except UnicodeDecodeError:
                        bad.report(number, "not UTF-8 text")
                        continue
                    if text.strip():
                        yield number, text
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        where = f" after line {number}" if number else ""
        raise InvalidInputFileError(f"{path} cannot be read{where}: {reason}.") from error


def user_name(value: Any, what: str) -> str:
    """A user as text. Raises BadValueError if it is blank, negative, too long or neither text nor an integer."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"{what} must be a name or an integer, not {_shown(value)}")
    if isinstance(value, int) and value < 0:
        raise BadValueError(f"{what} is negative ({_shown(value)})")
    name = str(value).strip()
    if not name:
        raise BadValueError(f"{what} is blank")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise BadValueError(f"{what} is not valid Unicode") from error
    if size > MAX_USER_ID_BYTES:
        raise BadValueError(f"{what} is longer than {MAX_USER_ID_BYTES} bytes")
    return name


def item_id(value: Any, what: str) -> int:
    """An item id from a JSON value. Raises BadValueError unless it is an integer from 0 to MAX_ITEM."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValueError(f"{what} must be an integer, not {_shown(value)}")
    if value < 0:
        raise BadValueError(f"{what} is negative ({_shown(value)})")
    if value > MAX_ITEM:
        raise BadValueError(f"{what} is larger than {MAX_ITEM}")
    return value


def seconds(value: Any, what: str, units_per_second: float = 1.0) -> float:
    """A point in time from a JSON value, in seconds. Raises BadValueError unless it is a finite number, 0 or later."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadValueError(f"{what} must be a number, not {_shown(value)}")
    if value < 0:
        raise BadValueError(f"{what} is negative ({_shown(value)})")
    try:
        result = value / units_per_second
    except OverflowError as error:  # an integer of hundreds of digits
        raise BadValueError(f"{what} is too large") from error
    if not math.isfinite(result):
        raise BadValueError(f"{what} is not finite")
    return result


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
