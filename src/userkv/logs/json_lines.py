"""JSON objects, one a line, with errors that can be shown to a user."""

from __future__ import annotations

import json
from typing import Any

from userkv.logs.events import BadValueError


def json_object(text: str) -> dict[str, Any]:
    """The object on this line. Raises BadValueError if it is no JSON or no object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadValueError(f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested too deeply
        raise BadValueError("not usable JSON (a number too long or nesting too deep)") from error
    if not isinstance(value, dict):
        raise BadValueError("not a JSON object")
    return value


def required(record: dict[str, Any], key: str) -> Any:
    """``record[key]``. Raises BadValueError if the key is missing."""
    if key not in record:
        raise BadValueError(f'"{key}" is missing')
    return record[key]


def required_list(record: dict[str, Any], key: str) -> list[Any]:
    """``record[key]`` as a list. Raises BadValueError if it is missing or no list."""
    value = required(record, key)
    if not isinstance(value, list):
        raise BadValueError(f'"{key}" must be a list')
    return value
