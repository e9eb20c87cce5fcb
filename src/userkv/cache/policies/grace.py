"""Spares those who have just been used, whatever another policy thinks of them."""

import time
from collections import OrderedDict
from collections.abc import Callable

from userkv.cache.policies.policy import EvictionPolicy, K


class GracePeriod(EvictionPolicy[K]):
    """Another policy's order for all who were used longer ago; the others go after them, least recently used first.

    For a cache whose users need to stay for a moment although nobody holds them: between the question what there is of
    a user and reading it, or between one object of a user and the next. Every operation is O(1), amortised.

    Args:
        policy: the order; empty, and this one's from now on.
        seconds: how long.
        clock: seconds, monotonic.

    """

    def __init__(self, policy: EvictionPolicy[K], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._seconds = seconds
        self._clock = clock
        self._recent: OrderedDict[K, float] = OrderedDict()

    def note_request(self, user: K, size: int) -> None:
        self._policy.note_request(user, size)

    def add(self, user: K) -> None:
        if user in self:
            raise ValueError(f"user {user!r} is evictable already")
        now = self._clock()
        # By twos, so that the first eviction after a long time does not find a million of them.
        self._pass_on(now, 2)
        self._recent[user] = now

    def discard(self, user: K) -> None:
        if self._recent.pop(user, None) is None:
            self._policy.discard(user)

    def victim(self) -> K | None:
        self._pass_on(self._clock(), len(self._recent))
        victim = self._policy.victim()
        return victim if victim is not None else next(iter(self._recent), None)

    def _pass_on(self, now: float, at_most: int) -> None:
        for _ in range(at_most):
            if not self._recent or now - next(iter(self._recent.values())) < self._seconds:
                break
            self._policy.add(self._recent.popitem(last=False)[0])

    def clear(self) -> None:
        self._recent.clear()
        self._policy.clear()

    def __contains__(self, user: object) -> bool:
        return user in self._recent or user in self._policy

    def __len__(self) -> int:
        return len(self._recent) + len(self._policy)
