"""Spares users that have just been used, whatever another policy thinks of them."""

import time
from collections import OrderedDict
from collections.abc import Callable

from userkv.cache.policies.policy import EvictionPolicy, K


class GracePeriod(EvictionPolicy[K]):
    """Another policy's order for users that were used longer ago; the others come after them, in LRU order.

    For a cache in which users need to stay for a moment although no operation holds them: between a look-up and the
    read that follows, or between one object of a user and the next. Every operation is O(1), amortised.

    Args:
        policy: the order; empty, and owned by this one from now on.
        seconds: how long a user is spared.
        clock: seconds, monotonic.

    """

    def __init__(self, policy: EvictionPolicy[K], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._seconds = seconds
        self._clock = clock
        self._recent: OrderedDict[K, float] = OrderedDict()

    def count_request(self, user: K, size: int) -> None:
        self._policy.count_request(user, size)

    def add(self, user: K) -> None:
        if user in self:
            raise ValueError(f"user {user!r} is evictable already")
        now = self._clock()
        # Two at a time, so that the first eviction after a long time does not have to pass on a million of them.
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
