"""Values of command-line options, each refused with one sentence that names the option."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from userkv.core.errors import InvalidSettingError


def whole_number(option: str, text: str, minimum: int = 1) -> int:
    """The integer in ``text``. Raises InvalidSettingError if it is none or below ``minimum``."""
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise InvalidSettingError(f"{option} must be a whole number of at least {minimum}, not {text!r}.")
    return value


def number(option: str, text: str) -> float:
    """The finite number in ``text``. Raises InvalidSettingError if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidSettingError(f"{option} must be a number, not {text!r}.")
    return value


def number_range(option: str, text: str) -> tuple[int, int]:
    """(low, high) of ``LOW:HIGH``, or of ``N`` alone. Raises InvalidSettingError unless 1 <= LOW <= HIGH."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise InvalidSettingError(f"{option} must be LOW:HIGH with 1 <= LOW <= HIGH, not {text!r}.")
    return bounds


def speed(option: str, text: str) -> float | None:
    """None for "max", else the factor above 0 in ``text``. Raises InvalidSettingError for anything else."""
    if text == "max":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise InvalidSettingError(f"{option} must be a number above 0 or 'max', not {text!r}.")
    return factor


def key_values(option: str, texts: Iterable[str]) -> dict[str, Any]:
    """``{"max_num_seqs": 8}`` of ``["max-num-seqs=8"]``; values are JSON where they can be, else text.

    Raises InvalidSettingError for a text without a key and "=".
    """
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise InvalidSettingError(f"{option} must be NAME=VALUE, not {text!r}.")
        try:
            pairs[name] = json.loads(value)
        except ValueError:
            pairs[name] = value
    return pairs
