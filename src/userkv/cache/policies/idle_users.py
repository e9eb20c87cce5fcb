"""Idle users in no order; the one worth least is found by comparing a sample."""

from array import array
from random import Random
from typing import Generic

from userkv.cache.policies.policy import K
from userkv.cache.policies.worth import RequestWorth

SAMPLE = 12
"""Users that are compared to find a victim. The least of 12 is among the least 8 % on average. An exact order would
have to be updated at every request, for every half-life."""

FEW = 24
"""Up to this many users, all are compared."""


class IdleUsers(Generic[K]):
    """A set of users with O(1) operations, and the one worth least of a random sample. Not thread-safe.

    Args:
        worth: of all users.
        seed: of the samples, so that runs can be repeated.

    """

    def __init__(self, worth: RequestWorth, seed: int = 0) -> None:
        self._worth = worth
        self._users: list[K] = []
        self._slots = array("I")  # Of RequestWorth, so that comparing users need not hash them again.
        self._places: dict[K, int] = {}
        self._random = Random(seed).random

    def add(self, user: K) -> None:
        """Add a user that is not in the set."""
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
        """The user worth least in a sample, by the half-life of number ``which``; ``None`` if the set is empty."""
        count = len(self._users)
        if count == 0:
            return None
        step = 1 if count <= FEW else count // SAMPLE
        compared = count if count <= FEW else SAMPLE
        # One random number is enough, since users that came and left have shuffled the list.
        first = int(self._random() * (count - (compared - 1) * step))
        worths = self._worth.by(which)
        found = [worths[slot] for slot in self._slots[first : first + compared * step : step]]
        return self._users[first + step * found.index(min(found))]

    def clear(self) -> None:
        """Remove all users."""
        self._users.clear()
        self._places.clear()
        del self._slots[:]

    def __contains__(self, user: object) -> bool:
        return user in self._places

    def __len__(self) -> int:
        return len(self._users)
