"""Reads a ranking request; what is wrong with it becomes one sentence about one field.

The server and ``userkv rank`` share it, so a bad line of a file is refused in the words of the server.
"""

import difflib
from typing import Any

import msgspec

from userkv.client.wire import Item, RankRequest
from userkv.core.errors import InvalidUserRequestError
from userkv.core.request import MAX_USER_ID_BYTES

_FIELDS = RankRequest.__struct_fields__
_ALIASES = {"user": "user_id", "uid": "user_id", "items": "candidates", "k": "top_k", "limit": "top_k"}
_EXPECTED = {
    "user_id": f"a string of 1 to {MAX_USER_ID_BYTES} bytes",
    "history": "a list of items",
    "candidates": "a list of items",
    "top_k": "a whole number of at least 1",
}
_LISTS = ("history", "candidates")
_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a fraction",
    str: "a string",
    list: "a list",
    dict: "an object",
}

_decoder = msgspec.json.Decoder(RankRequest)


class BadFieldError(InvalidUserRequestError):
    """A field of a ranking request cannot be used.

    Attributes:
        param: its name; ``None`` if it is not one field.

    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def parse_request(body: bytes | str) -> RankRequest:
    """A request from JSON, with every field of the right type. What only the model knows is not checked.

    Raises:
        BadFieldError: it is none.

    """
    try:
        try:
            return _decoder.decode(body)
        except msgspec.ValidationError as error:
            raise (_first_fault(msgspec.json.decode(body)) or BadFieldError(f"the request: {error}")) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadFieldError(f"the request is no JSON ({error}); send an object with user_id and history") from None


def _first_fault(request: Any) -> BadFieldError | None:
    """The first field of a JSON value that does not fit; ``None`` if all do, as with a field that occurs twice."""
    if not isinstance(request, dict):
        return BadFieldError(f"the request must be a JSON object with user_id and history, not {_kind(request)}")
    for name in request:
        if name not in _FIELDS:
            return _unknown_field(name)
    for field in msgspec.structs.fields(RankRequest):
        if field.name not in request:
            if field.required:
                return BadFieldError(f"{field.name} is missing; add it to the request", field.name)
        elif fault := _fault_of(field, request[field.name]):
            return BadFieldError(fault, field.name)
    return None


def _fault_of(field: msgspec.structs.FieldInfo, value: Any) -> str:
    """What is wrong with a field's value; "" if nothing is."""
    if _fits(value, field.type):
        return ""
    if field.name in _LISTS and isinstance(value, list):
        place, item = next((place, item) for place, item in enumerate(value) if not _fits(item, Item))
        if not isinstance(item, list):
            return f"{field.name}[{place}] must be a whole number or a list of tokens, not {_kind(item)}"
        at, token = next((at, token) for at, token in enumerate(item) if not _fits(token, int))
        return f"{field.name}[{place}][{at}] must be a whole number, as all tokens are, not {_kind(token)}"
    return f"{field.name} must be {_EXPECTED.get(field.name, 'a string')}, not {_kind(value)}"


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _kind(value: Any) -> str:
    """The value, if it is a number and the wrong one; else the kind of JSON value that it is."""
    return str(value) if type(value) is int else _KINDS[type(value)]


def _unknown_field(name: str) -> BadFieldError:
    plain = name.lower().replace("-", "_")
    close = difflib.get_close_matches(plain, _FIELDS, n=1, cutoff=0.6)
    meant = _ALIASES.get(plain) or (close[0] if close else None)
    advice = f"did you mean {meant!r}?" if meant else f"the fields are {', '.join(_FIELDS)}"
    return BadFieldError(f"there is no field {name[:80]!r}; {advice}", name[:80])
