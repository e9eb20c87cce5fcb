"""Belady's policy, which knows all requests to come: the bound for every other policy."""

from collections import defaultdict, deque
from collections.abc import Iterable

from userkv.cache.policies.policy import EvictionPolicy, K

NEVER = 1 << 62


class BeladyPolicy(EvictionPolicy[K]):
    """Evicts the user whose next request is farthest away (Belady, IBM Systems Journal 5(2), 1966).

    The next request for any block of a user is the same, and blocks are of one size. So with victims that lose no more
    than is needed, no policy can hit more when requests run one at a time. With whole users as victims it can, since
    their sizes differ. Finding a victim is O(users).

    Args:
        users: the users of all requests to come, in order; each call of :meth:`count_request` is the next of them.

    """

    def __init__(self, users: Iterable[K]) -> None:
        self._next: dict[K, deque[int]] = defaultdict(deque)
        for place, user in enumerate(users):
            self._next[user].append(place)
        self._idle: dict[K, int] = {}

    def count_request(self, user: K, size: int) -> None:
        self._next[user].popleft()

    def add(self, user: K) -> None:
        if user in self._idle:
            raise ValueError(f"user {user!r} is evictable already")
        coming = self._next[user]
        self._idle[user] = coming[0] if coming else NEVER

    def discard(self, user: K) -> None:
        self._idle.pop(user, None)

    def victim(self) -> K | None:
        return max(self._idle, key=self._idle.__getitem__, default=None)

    def clear(self) -> None:
        self._idle.clear()

    def __contains__(self, user: object) -> bool:
        return user in self._idle

    def __len__(self) -> int:
        return len(self._idle)
