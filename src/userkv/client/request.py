"""Reads a ranking request; what is wrong with it becomes one sentence about one field.

The server and ``userkv rank`` share it, so a bad line of a file is refused in the words of the server.
"""

import difflib
import re

import msgspec

from userkv.client.wire import RankRequest
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
_PLACE = re.compile(r"\A(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?\Z", re.DOTALL)
_UNKNOWN = re.compile(r"\AObject contains unknown field `(?P<name>.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"\AObject missing required field `(?P<name>\w+)`\Z")
_GOT = re.compile(r", got `(?P<got>\w+)`\Z")

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
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadFieldError(f"the request is no JSON ({error}); send an object with user_id and history") from None


def _explained(text: str) -> BadFieldError:
    place = _PLACE.match(text)
    assert place is not None
    what, path = place["what"], place["path"] or ""
    if unknown := _UNKNOWN.match(what):
        return _unknown_field(unknown["name"])
    if missing := _MISSING.match(what):
        return BadFieldError(f"{missing['name']} is missing; add it to the request", missing["name"])
    got = _GOT.search(what)
    but = f", not {got['got']}" if got else ""
    if not path:
        return BadFieldError(f"the request must be a JSON object with user_id and history{but}")
    name, _, index = path.partition("[")
    expected = _EXPECTED.get(name, "a string")
    if index:
        expected = "a whole number, as all tokens are" if "[" in index else "a whole number or a list of tokens"
    return BadFieldError(f"{path} must be {expected}{but}", name)


def _unknown_field(name: str) -> BadFieldError:
    plain = name.lower().replace("-", "_")
    close = difflib.get_close_matches(plain, _FIELDS, n=1, cutoff=0.6)
    meant = _ALIASES.get(plain) or (close[0] if close else None)
    advice = f"did you mean {meant!r}?" if meant else f"the fields are {', '.join(_FIELDS)}"
    return BadFieldError(f"there is no field {name[:80]!r}; {advice}", name[:80])
