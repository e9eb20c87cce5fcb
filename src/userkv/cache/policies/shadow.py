"""A simulated cache that holds only sizes: it counts how much another order of eviction would have hit."""

from collections.abc import Callable
from math import inf
from typing import Generic

from userkv.cache.policies.idle_users import IdleUsers
from userkv.cache.policies.policy import K
from userkv.cache.policies.worth import RequestWorth


class Shadow(Generic[K]):
    """The sizes of the users that a cache would hold, if the user worth least were always evicted first.

    Not thread-safe. A request costs O(1), and an eviction a sample of :class:`IdleUsers`.

    Args:
        capacity: of the cache, in the unit of the sizes.
        worth: of users.
        which: the number of the half-life that decides.
        max_users: how many users the cache holds at most.

    """

    def __init__(self, capacity: float, worth: RequestWorth, which: int, max_users: float = inf) -> None:
        self._capacity = capacity
        self._max_users = max_users
        self._which = which
        self._sizes: dict[K, float] = {}
        self._users: IdleUsers[K] = IdleUsers(worth)
        self._used = 0.0

    def __len__(self) -> int:
        return len(self._sizes)

    def count_request(self, user: K, size: float) -> float:
        """Count a request of a user with a history of ``size``; returns how much of it would have been held."""
        held = self._sizes.get(user, 0.0)
        if not size:  # A request without a history: there is nothing to hold.
            if held:
                self._drop(user)
            return 0.0
        if not held:
            self._users.add(user)
        self._sizes[user] = size
        self._used += size - held
        self._keep_to_capacity()
        return min(held, size)

    def halve(self, keep: Callable[[K], bool]) -> None:
        """Go on with half of the capacity, and only with the users that ``keep`` accepts."""
        for user in [user for user in self._sizes if not keep(user)]:
            self._drop(user)
        self._capacity /= 2
        self._max_users /= 2
        self._keep_to_capacity()

    def double(self) -> None:
        """Go on with twice the capacity, for users that were not counted so far."""
        self._capacity *= 2
        self._max_users *= 2

    def _keep_to_capacity(self) -> None:
        while self._used > self._capacity or len(self._sizes) > self._max_users:
            victim = self._users.least(self._which)
            assert victim is not None
            if self._used <= self._capacity:
                self._drop(victim)
                continue
            excess = self._used - self._capacity
            if self._sizes[victim] > excess:
                self._sizes[victim] -= excess
                self._used = self._capacity
            else:
                self._drop(victim)

    def _drop(self, user: K) -> None:
        self._used -= self._sizes.pop(user)
        self._users.discard(user)
