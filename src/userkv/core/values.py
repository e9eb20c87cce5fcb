"""Checks of values from JSON and from Python, each refused with one sentence that names the option."""

import math
from typing import Any

from userkv.core.errors import InvalidOptionError


def text(option: str, value: Any) -> str:
    """The text. Raises InvalidOptionError if it is none."""
    if not isinstance(value, str):
        raise InvalidOptionError(option, f"must be text in quotes, not {value!r}")
    return value


def switch(option: str, value: Any) -> bool:
    """True or false. Raises InvalidOptionError for anything else."""
    if not isinstance(value, bool):
        raise InvalidOptionError(option, f"must be true or false, not {value!r}")
    return value


def seconds(option: str, value: Any) -> float:
    """A finite number of 0 or more. Raises InvalidOptionError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidOptionError(option, f"must be a number of seconds of 0 or more, not {value!r}")
    return float(value)


def whole_number(option: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """An integer in the given bounds. Raises InvalidOptionError for anything else."""
    if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
        raise InvalidOptionError(option, f"must be a whole number {bounds(minimum, maximum)}, not {value!r}")
    return value


def bounds(minimum: int, maximum: int | None) -> str:
    """The bounds of a number in words."""
    return f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
