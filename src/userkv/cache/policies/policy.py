"""The contract of eviction policies: which user goes next."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """Order of the users that may be evicted, and of no others.

    A user is added when the last of his requests (in the pool: of the operations on his objects) ends, and discarded
    when one starts, so a policy never sees a user it must skip: finding a victim needs no scan of all users. There is
    no separate question of admission: a user who is worth less than all others is simply the first victim once he is
    idle.

    All operations are O(1) (or O(log n) where a policy needs an order of its own). Not thread-safe: the scheduler's
    thread, or the lock of the pool's books, guards it.
    """

    def note_request(self, user: K, size: int) -> None:
        """A request of ``user`` begins, whether anything of him is held or not; each request is noted once.

        Args:
            user: who.
            size: what his history takes when all of it is held, as well as that is known; in the unit of the cache's
                capacity.

        """

    @abstractmethod
    def add(self, user: K) -> None:
        """``user`` has just been used and may be evicted from now on. He must not be held already."""

    @abstractmethod
    def discard(self, user: K) -> None:
        """``user`` may not be evicted any more (or is gone). Unknown users are ignored."""

    @abstractmethod
    def victim(self) -> K | None:
        """The user to evict next, still held; ``None`` if nobody may be evicted.

        Without calls in between, the answer stays the same: who loses a part loses the rest, too, before others do.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everybody."""

    @abstractmethod
    def __contains__(self, user: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...
