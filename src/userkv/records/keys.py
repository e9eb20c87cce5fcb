"""Keys of the pool's objects.

Format (UserKV design, section 5)::

    {uid}@{model_name}@{world_size}@{worker_id}@{value_type}[@{layer_id}][@{extent_id}]

Every text field is percent-encoded (RFC 3986, unreserved characters kept), so no field can contain ``@`` and no two
different keys render alike; an extent id starts with ``x``, which no layer number does, so the two optional fields
cannot be confused either.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, unquote

from userkv.core.request import UserKey


class ValueType(StrEnum):
    """What an object holds."""

    TOKEN_ID = "token_id"
    """The user record: the history's tokens and the map of what is stored."""
    KV_CACHE = "kv_cache"
    """KV blocks."""


@dataclass(frozen=True, slots=True)
class MooncakeUserKey:
    """Key of one object of one user and one worker.

    Attributes:
        uid: the user id, any text.
        model_name: the namespace: model, weights version and fingerprint of everything that changes KV bytes.
        world_size: workers that share one copy of the model, at least 1.
        worker_id: which of them wrote the object, 0..world_size-1.
        value_type: what the object holds.
        extent_id: which extent of the user, a number that is never reused; ``None`` for objects without extents.

    """

    uid: str
    model_name: str
    world_size: int
    worker_id: int
    value_type: ValueType
    extent_id: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.worker_id < self.world_size:
            raise ValueError(f"worker {self.worker_id} of {self.world_size} does not exist")
        if self.extent_id is not None and self.extent_id < 0:
            raise ValueError(f"extent id {self.extent_id} is negative")

    def __str__(self) -> str:
        return _join(self._prefix(), self.extent_id)

    def split_layers(self, num_layers: int) -> "Iterator[LayerMooncakeUserKey]":
        """One key per layer, in layer order."""
        return (LayerMooncakeUserKey(self, layer_id) for layer_id in range(num_layers))

    def _prefix(self) -> str:
        uid, model = (quote(text, safe="") for text in (self.uid, self.model_name))
        return f"{uid}@{model}@{self.world_size}@{self.worker_id}@{self.value_type.value}"


@dataclass(frozen=True, slots=True)
class LayerMooncakeUserKey:
    """Key of one layer of an object (layerwise mode)."""

    whole: MooncakeUserKey
    layer_id: int

    def __post_init__(self) -> None:
        if self.layer_id < 0:
            raise ValueError(f"layer id {self.layer_id} is negative")

    def __str__(self) -> str:
        return _join(f"{self.whole._prefix()}@{self.layer_id}", self.whole.extent_id)


def pool_uid(key: UserKey) -> str:
    """The user's name in the pool: all of :class:`UserKey` but the adapter's number, which means something only to one
    engine; the pool's namespace has a digest of the adapter's weights instead.

    A user without adapter and salt keeps a readable name; ``/`` cannot occur in an encoded part.
    """
    parts = [quote(part, safe="") for part in (key.user_id, *key.scope[:3])]
    return "/".join(parts) if any(parts[1:]) else parts[0]


def parse_key(text: str) -> MooncakeUserKey | LayerMooncakeUserKey:
    """The key that renders as ``text``.

    Raises:
        ValueError: ``text`` is not the rendering of any key.

    """
    uid, model, world_size, worker_id, value_type, *optional = text.split("@")
    extent_id = int(optional.pop()[1:], 16) if optional and optional[-1].startswith("x") else None
    key = MooncakeUserKey(
        unquote(uid), unquote(model), int(world_size), int(worker_id), ValueType(value_type), extent_id
    )
    parsed = LayerMooncakeUserKey(key, int(optional[0])) if optional else key
    if str(parsed) != text:
        raise ValueError(f"{text!r} is not a key")
    return parsed


def _join(prefix: str, extent_id: int | None) -> str:
    return prefix if extent_id is None else f"{prefix}@x{extent_id:x}"
