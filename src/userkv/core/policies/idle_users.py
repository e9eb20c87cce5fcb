"""Users in no order, of whom the least worthy is found without keeping one."""

import random
from collections.abc import Callable
from typing import Generic

from userkv.core.policies.policy import K

SAMPLE = 24
"""Users that are compared to find one to evict. The least of 24 is among the least 3 % of all on average, and an order
that is always right would have to be kept up at every request, for every half-life."""


class IdleUsers(Generic[K]):
    """A set of users with O(1) operations, and the least worthy of a random sample of them.

    Up to twice :data:`SAMPLE` users, all are compared. Not thread-safe.

    Args:
        seed: of the samples, so that runs can be repeated.

    """

    def __init__(self, seed: int = 0) -> None:
        self._users: list[K] = []
        self._places: dict[K, int] = {}
        self._random = random.Random(seed)

    def add(self, user: K) -> None:
        """Add a user who is not in the set."""
        self._places[user] = len(self._users)
        self._users.append(user)

    def discard(self, user: K) -> None:
        """Remove a user; unknown ones are ignored."""
        place = self._places.pop(user, None)
        if place is None:
            return
        last = self._users.pop()
        if place < len(self._users):
            self._users[place] = last
            self._places[last] = place

    def least(self, worth: Callable[[K], float]) -> K | None:
        """The least worthy of a sample; ``None`` if there is nobody. Of equals, one who was added early."""
        if len(self._users) <= 2 * SAMPLE:
            return min(self._users, key=worth, default=None)
        return min(self._random.choices(self._users, k=SAMPLE), key=worth)

    def clear(self) -> None:
        """Remove everybody."""
        self._users.clear()
        self._places.clear()

    def __contains__(self, user: object) -> bool:
        return user in self._places

    def __len__(self) -> int:
        return len(self._users)
