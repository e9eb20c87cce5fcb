"""The contract of eviction policies: which user goes next."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """Order of the users that may be evicted, and of no others.

    The table adds a user when the last of his requests ends and discards him when one starts, so a policy never sees a
    user it must skip: finding a victim needs no scan. All operations are O(1) (or O(log n) where a policy needs an
    order of its own). Not thread-safe: the scheduler thread owns it.
    """

    @abstractmethod
    def add(self, user: K) -> None:
        """``user`` has just been used and may be evicted from now on. He must not be held already."""

    @abstractmethod
    def discard(self, user: K) -> None:
        """``user`` may not be evicted any more (or is gone). Unknown users are ignored."""

    @abstractmethod
    def victim(self) -> K | None:
        """The user to evict next, still held; ``None`` if nobody may be evicted."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everybody."""

    @abstractmethod
    def __contains__(self, user: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...
