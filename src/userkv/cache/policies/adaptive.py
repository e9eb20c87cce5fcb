"""The default policy: recent and frequent users stay, in the mixture that would have hit most lately."""

from math import inf

from userkv.cache.policies.idle_users import IdleUsers
from userkv.cache.policies.policy import EvictionPolicy, K
from userkv.cache.policies.shadow import Shadow
from userkv.cache.policies.worth import RequestWorth

HALF_LIVES = (0.5, 4.0, 32.0)
"""Half-lives to choose from, in *turnovers*: as many requests as users fit into the cache. 0.5 is nearly LRU."""

MEMORY = 16.0
"""Turnovers after which a hit counts half in the choice."""

MOST_SHADOW_USERS = 256
"""With more, the shadows watch half of the users, and so on. A sample of users shows how well a cache does
(Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017)."""

LEAST_SHADOW_USERS = 64
"""With fewer, they watch twice as many users again."""


class AdaptiveUserPolicy(EvictionPolicy[K]):
    """Evicts the user with the smallest decayed number of requests, by the half-life that suits the traffic.

    Users that come in sessions and leave want LRU. Where some users are always more active than others, counts over
    long times are better. Most traffic is a mixture that changes. So each half-life has a :class:`Shadow`, which
    counts every request, and the half-life with the most hits in its shadow lately decides. An eviction compares a
    random sample of the users (all of them if they are few), so no order per half-life has to be kept.

    Args:
        capacity: what the cache holds, in the unit of the sizes that :meth:`count_request` gets.
        max_users: how many users it holds at most.
        half_lives: in turnovers; a single one makes a policy that does not adapt.

    """

    def __init__(self, capacity: float, max_users: float = inf, half_lives: tuple[float, ...] = HALF_LIVES) -> None:
        self._worth = RequestWorth(half_lives)
        self._shadows: list[Shadow[K]] = [
            Shadow(capacity, self._worth, which, max_users) for which in range(len(half_lives))
        ]
        self._gains = [0.0] * len(half_lives)
        self._rate = 1
        self._time = 0.0
        self._chosen = len(half_lives) // 2
        self._users: IdleUsers[K] = IdleUsers(self._worth)
        self._victim: K | None = None

    @property
    def half_life(self) -> float:
        """The half-life that decides now, in turnovers."""
        return self._worth.half_lives[self._chosen]

    def count_request(self, user: K, size: int) -> None:
        turnover = 1.0 / max(1, len(self._shadows[self._chosen]) * self._rate)
        self._time += turnover
        self._worth.count(user, self._time)
        if not self._is_watched(user):
            return
        fade = 2.0 ** (-turnover * self._rate / MEMORY)
        for which, shadow in enumerate(self._shadows):
            self._gains[which] = self._gains[which] * fade + shadow.count_request(user, size)
        best = max(self._gains)
        if self._gains[self._chosen] < best:
            self._chosen = self._gains.index(best)
        watched = len(self._shadows[self._chosen])
        if watched > MOST_SHADOW_USERS:
            self._rate *= 2
            for shadow in self._shadows:
                shadow.halve(self._is_watched)
        elif watched < LEAST_SHADOW_USERS and self._rate > 1:
            self._rate //= 2
            for shadow in self._shadows:
                shadow.double()

    def add(self, user: K) -> None:
        if user in self._users:
            raise ValueError(f"user {user!r} is evictable already")
        self._users.add(user)

    def discard(self, user: K) -> None:
        self._users.discard(user)
        if user == self._victim:
            self._victim = None

    def victim(self) -> K | None:
        if self._victim is None:
            self._victim = self._users.least(self._chosen)
        return self._victim

    def clear(self) -> None:
        self._users.clear()
        self._victim = None

    def _is_watched(self, user: K) -> bool:
        # Other bits of the hash than those that choose a slot of RequestWorth.
        return (hash(user) >> 24) % self._rate == 0

    def __contains__(self, user: object) -> bool:
        return user in self._users

    def __len__(self) -> int:
        return len(self._users)
