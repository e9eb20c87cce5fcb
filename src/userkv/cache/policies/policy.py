"""The contract of eviction policies: which user is evicted next."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An order of the users that may be evicted. It holds these users and no others.

    The cache adds a user when its last request ends, and discards it when one starts. (In the pool: when the last
    operation on its objects ends.) So a policy never sees a user that it must skip, and finding a victim needs no scan
    of all users. Admission is no separate decision: a user that is worth less than all others is the first victim as
    soon as it is idle.

    All operations are O(1), or O(log n) where a policy keeps users sorted. Not thread-safe: the scheduler's thread
    owns the policy of HBM, and the lock of the local pool's index guards the one of the pool.
    """

    def count_request(self, user: K, size: int) -> None:
        """A request of ``user`` begins, whether any KV of it is held or not. Called once per request.

        Args:
            user: the user.
            size: what its history takes when all of it is held, as well as that is known; in the unit of the cache's
                capacity.

        """

    @abstractmethod
    def add(self, user: K) -> None:
        """``user`` has just been used and may be evicted from now on.

        Raises:
            ValueError: the policy holds it already.

        """

    @abstractmethod
    def discard(self, user: K) -> None:
        """``user`` may not be evicted any more, or was evicted. Unknown users are ignored."""

    @abstractmethod
    def victim(self) -> K | None:
        """The user to evict next, which the policy still holds; ``None`` if no user may be evicted.

        Without calls in between, the answer stays the same: a user that loses a part loses the rest before others do.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all users."""

    @abstractmethod
    def __contains__(self, user: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...
