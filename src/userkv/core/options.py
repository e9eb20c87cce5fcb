"""Values of command-line options, each refused with one sentence that names the option."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from userkv.core.errors import InvalidOptionError
from userkv.core.values import bounds


def whole_number(option: str, text: str, minimum: int = 1, maximum: int | None = None) -> int:
    """The integer in ``text``. Raises InvalidOptionError if it is none or out of bounds; ``minimum`` is at least 0."""
    digits = text.strip()
    value = int(digits) if digits.isascii() and digits.isdigit() else minimum - 1
    if value < minimum or (maximum is not None and value > maximum):
        raise InvalidOptionError(option, f"must be a whole number {bounds(minimum, maximum)}, not {text!r}")
    return value


def switch(option: str, text: str) -> bool:
    """Whether ``text`` says on. Raises InvalidOptionError unless it says on or off."""
    word = text.strip().lower()
    if word in ("1", "true", "on", "yes", "enable"):
        return True
    if word in ("0", "false", "off", "no", "disable"):
        return False
    raise InvalidOptionError(option, f"must be on or off (1 or 0), not {text!r}")


def number(option: str, text: str) -> float:
    """The finite number in ``text``. Raises InvalidOptionError if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidOptionError(option, f"must be a number, not {text!r}")
    return value


def number_range(option: str, text: str) -> tuple[int, int]:
    """(low, high) of ``LOW:HIGH``, or of ``N`` alone. Raises InvalidOptionError unless 1 <= LOW <= HIGH."""
    low, _, high = text.partition(":")
    try:
        limits = int(low), int(high or low)
    except ValueError:
        limits = (0, 0)
    if not 1 <= limits[0] <= limits[1]:
        raise InvalidOptionError(option, f"must be LOW:HIGH with 1 <= LOW <= HIGH, not {text!r}")
    return limits


def speed(option: str, text: str) -> float | None:
    """None for "max", else the factor above 0 in ``text``. Raises InvalidOptionError for anything else."""
    if text == "max":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise InvalidOptionError(option, f"must be a number above 0 or 'max', not {text!r}")
    return factor


def key_values(option: str, texts: Iterable[str]) -> dict[str, Any]:
    """``{"max_num_seqs": 8}`` of ``["max-num-seqs=8"]``; values are JSON where they can be, else text.

    Raises InvalidOptionError for a text without a key and "=".
    """
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise InvalidOptionError(option, f"must be NAME=VALUE, not {text!r}")
        try:
            pairs[name] = json.loads(value)
        except ValueError:
            pairs[name] = value
    return pairs
