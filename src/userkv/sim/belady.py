"""The policy that knows the future."""

from collections import defaultdict, deque
from collections.abc import Iterable

from userkv.cache.policies.policy import EvictionPolicy, K

NEVER = 1 << 62


class BeladyPolicy(EvictionPolicy[K]):
    """Evicts the user whose next request is farthest away (Belady, IBM Systems Journal 5(2), 1966).

    All blocks of a user are next asked for by the same request and blocks are of one size, so with victims that lose no
    more than is needed this is the most that any policy can hit when requests run one at a time. Over whole users it
    is not quite: their sizes differ. Finding a victim is O(users).

    Args:
        users: who will send a request, in order; each call of :meth:`note_request` is the next of them.

    """

    def __init__(self, users: Iterable[K]) -> None:
        self._next: dict[K, deque[int]] = defaultdict(deque)
        for place, user in enumerate(users):
            self._next[user].append(place)
        self._idle: dict[K, int] = {}

    def note_request(self, user: K, size: int) -> None:
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
