"""The request contract: what a client says about a user in ``kv_transfer_params``."""

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from userkv.core.errors import InvalidUserRequestError

MAX_USER_ID_BYTES = 256
STAGES = ("rank", "prefill")
OUR_KEYS = ("user_id", "history_len", "stage", "read", "write")
_DISTINCT_KEYS = ("user_id", "history_len")
"""No other connector's key looks like these; the others are common words that a request without a user may have."""

_ALIASES = {
    "uid": "user_id",
    "user": "user_id",
    "historylength": "history_len",
    "histlen": "history_len",
    "historytokens": "history_len",
}
_FOREIGN_PREFIXES = ("remote_", "do_remote_")


class KVScope(NamedTuple):
    """What a user's KV depends on beside its history: the LoRA adapter, and a cache salt that separates tenants.

    A retrained adapter may come back under its old name, or even its old path. vLLM gives it another number when it is
    loaded again.
    """

    lora_name: str = ""
    lora_path: str = ""
    cache_salt: str = ""
    lora_number: int = 0


NO_SCOPE = KVScope()
"""The scope of the base model without a salt; one object for the keys of all users."""


class UserKey(NamedTuple):
    """The name under which a user's KV is kept. KV computed under one key is never used under another."""

    user_id: str
    scope: KVScope = NO_SCOPE


@dataclass(frozen=True, slots=True)
class UserRequest:
    """The validated user part of one request.

    Attributes:
        user_id: opaque name of the user, 1 to 256 bytes of UTF-8.
        history_len: how many of the first prompt tokens are history; the rest are candidates.
        stage: what the request is for: ``rank`` (score candidates) or ``prefill`` (compute a history ahead of time).
        read: use the KV kept for this user.
        write: keep the KV of this history for later requests.

    """

    user_id: str
    history_len: int
    stage: str = "rank"
    read: bool = True
    write: bool = True

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, prompt_len: int) -> "UserRequest | None":
        """Read the user part of ``kv_transfer_params``; ``None`` for an ordinary request.

        Keys that belong to other KV connectors are left alone.

        Args:
            params: ``kv_transfer_params`` of the request, or ``None``.
            prompt_len: length of the prompt in tokens.

        Raises:
            InvalidUserRequestError: a value of ours is wrong, or a key looks like a misspelt one of ours.

        """
        if params is None:
            return None
        if not isinstance(params, Mapping):
            raise InvalidUserRequestError(f"kv_transfer_params must be an object, not {_kind(params)}")
        for key in params:
            _refuse_misspelt(key, OUR_KEYS if "user_id" in params else _DISTINCT_KEYS)
        if "user_id" not in params:
            ours = [key for key in OUR_KEYS if key in params]
            if ours:
                raise InvalidUserRequestError(
                    f"kv_transfer_params has {ours[0]!r} without 'user_id'; add the user's id"
                )
            return None
        return cls(
            user_id=_user_id(params["user_id"]),
            history_len=_history_len(params.get("history_len"), prompt_len),
            stage=_stage(params.get("stage", "rank")),
            read=_switch(params, "read"),
            write=_switch(params, "write"),
        )


class ReadParams(dict[str, Any]):
    """``kv_transfer_params`` with the user part that was read from them, so that a process reads them once.

    It equals the plain object, and other processes receive the plain object. Must not be changed.

    Attributes:
        user: what :meth:`UserRequest.parse` returned.
        prompt_len: tokens of the prompt that it was read for.

    """

    __slots__ = ("prompt_len", "user")

    def __init__(self, params: Mapping[str, Any], user: UserRequest | None, prompt_len: int) -> None:
        super().__init__(params)
        self.user = user
        self.prompt_len = prompt_len

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(dict(self), memo), self.user, self.prompt_len)


def read_user(params: Mapping[str, Any] | None, prompt_len: int) -> UserRequest | None:
    """:meth:`UserRequest.parse`, or what it returned before for the same parameters and prompt length.

    Raises:
        InvalidUserRequestError: as ``parse`` does.

    """
    if isinstance(params, ReadParams) and params.prompt_len == prompt_len:
        return params.user
    return UserRequest.parse(params, prompt_len)


def foreign_params(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What remains of ``kv_transfer_params`` for other KV connectors; ``None`` if nothing does."""
    return {key: value for key, value in (params or {}).items() if key not in OUR_KEYS} or None


def _user_id(value: Any) -> str:
    if not isinstance(value, str):
        advice = "leave it out for a request without a user" if value is None else "write it in quotes"
        raise InvalidUserRequestError(f"user_id must be a string, not {_kind(value)}; {advice}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidUserRequestError("user_id is not valid Unicode; remove its lone surrogates") from None
    if not 1 <= size <= MAX_USER_ID_BYTES:
        raise InvalidUserRequestError(f"user_id must have 1 to {MAX_USER_ID_BYTES} bytes of UTF-8, not {size}")
    return value


def _history_len(value: Any, prompt_len: int) -> int:
    if value is None:
        return prompt_len
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidUserRequestError(f"history_len must be an integer number of tokens, not {_kind(value)}")
    if not 0 <= value <= prompt_len:
        raise InvalidUserRequestError(
            f"history_len must be between 0 and the prompt's {prompt_len} tokens, but it is {value}"
        )
    return value


def _stage(value: Any) -> str:
    if not isinstance(value, str) or value not in STAGES:
        raise InvalidUserRequestError(f"stage must be one of {', '.join(STAGES)}, not {value!r}")
    return value


def _switch(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name, True)
    if not isinstance(value, bool):
        raise InvalidUserRequestError(f"{name} must be true or false, not {_kind(value)}")
    return value


def _refuse_misspelt(key: Any, ours: tuple[str, ...]) -> None:
    if not isinstance(key, str) or key in OUR_KEYS or key.startswith(_FOREIGN_PREFIXES):
        return
    plain = key.lower().replace("_", "").replace("-", "")
    meant = _ALIASES.get(plain)
    if meant is None:
        squeezed = {name.replace("_", ""): name for name in ours}
        close = difflib.get_close_matches(plain, squeezed, n=1, cutoff=0.8)
        meant = squeezed[close[0]] if close else None
    if meant is not None:
        raise InvalidUserRequestError(f"kv_transfer_params has no key {key!r}; did you mean {meant!r}?")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
