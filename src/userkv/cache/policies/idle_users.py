"""Users in no order, of whom the least worthy is found without keeping one."""

from array import array
from random import Random
from typing import Generic

from userkv.cache.policies.policy import K
from userkv.cache.policies.worth import RequestWorth

SAMPLE = 12
"""Users that are compared to find one to evict. The least of 12 is among the least 8 % on average, and an order that is
always right would have to be kept up at every request, for every half-life."""

FEW = 24
"""Up to so many users, all are compared."""


class IdleUsers(Generic[K]):
    """A set of users with O(1) operations, and the least worthy of a random sample of them. Not thread-safe.

    Args:
        worth: of users.
        seed: of the samples, so that runs can be repeated.

    """

    def __init__(self, worth: RequestWorth, seed: int = 0) -> None:
        self._worth = worth
        self._users: list[K] = []
        self._slots = array("I")  # Beside the users, so that comparing them need not hash them again.
        self._places: dict[K, int] = {}
        self._random = Random(seed).random

    def add(self, user: K) -> None:
        """Add a user who is not in the set."""
        self._places[user] = len(self._users)
        self._users.append(user)
        self._slots.append(self._worth.slot_of(user))

    def discard(self, user: K) -> None:
        """Remove a user; unknown ones are ignored."""
        place = self._places.pop(user, None)
        if place is None:
            return
        last, slot = self._users.pop(), self._slots.pop()
        if place < len(self._users):
            self._users[place], self._slots[place] = last, slot
            self._places[last] = place

    def least(self, which: int) -> K | None:
        """The least worthy of a sample, by the half-life of number ``which``; ``None`` if there is nobody."""
        count = len(self._users)
        if count == 0:
            return None
        step = 1 if count <= FEW else count // SAMPLE
        compared = count if count <= FEW else SAMPLE
        # One random number, since users who have come and gone have shuffled the list.
        first = int(self._random() * (count - (compared - 1) * step))
        worths = self._worth.by(which)
        found = [worths[slot] for slot in self._slots[first : first + compared * step : step]]
        return self._users[first + step * found.index(min(found))]

    def clear(self) -> None:
        """Remove everybody."""
        self._users.clear()
        self._places.clear()
        del self._slots[:]

    def __contains__(self, user: object) -> bool:
        return user in self._places

    def __len__(self) -> int:
        return len(self._users)
