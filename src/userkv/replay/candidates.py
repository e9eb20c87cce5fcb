"""Fresh candidates: items that the user has not seen, never the same set twice."""

from __future__ import annotations

import itertools
from collections.abc import Set

import numpy as np

from userkv.core.errors import InvalidSettingError

_TRIES = 20
"""Draws of a whole set before one item of it is replaced by a new one."""


class CandidateSampler:
    """Draws ``low`` to ``high`` different items of a universe for a request, all absent from the user's history.

    universe: all item ids, each once. bounds: (low, high), both inclusive, at least 1, or InvalidSettingError is
    raised. rng: the only source of randomness, so equal seeds give equal candidates.

    Where the universe runs out (a small log, a user who has seen nearly all of it), the smallest ids outside of it
    are used as new items, each once: a catalogue always has items that nobody has touched yet.
    """

    def __init__(self, universe: np.ndarray, bounds: tuple[int, int], rng: np.random.Generator) -> None:
        low, high = bounds
        if not 1 <= low <= high:
            raise InvalidSettingError(
                f"The number of candidates must be LOW:HIGH with 1 <= LOW <= HIGH, not {low}:{high}."
            )
        self._universe = universe
        self._low, self._high = low, high
        self._rng = rng
        known = set(universe.tolist())
        self._new_items = (item for item in itertools.count() if item not in known)
        self._handed_out: set[int] = set()

    def draw(self, seen: Set[int]) -> tuple[int, ...]:
        """Candidates for one request of a user who has seen ``seen``."""
        for _ in range(_TRIES):
            candidates = self._unseen(int(self._rng.integers(self._low, self._high + 1)), seen)
            # A 64-bit hash instead of the set itself: millions of requests would fill the memory. A chance collision
            # costs one more draw and nothing else.
            fingerprint = hash(tuple(sorted(candidates)))
            if fingerprint not in self._handed_out:
                self._handed_out.add(fingerprint)
                return tuple(candidates)
        return (*candidates[:-1], next(self._new_items))

    def _unseen(self, count: int, seen: Set[int]) -> list[int]:
        found: dict[int, None] = {}
        # Drawing with replacement and dropping what is seen is quick when the universe is much larger than histories.
        for _ in range(4):
            for index in self._rng.integers(0, len(self._universe), size=2 * count):
                item = int(self._universe[index])
                if item not in seen and item not in found:
                    found[item] = None
                    if len(found) == count:
                        return list(found)
        left = [item for item in self._universe.tolist() if item not in seen]
        if len(left) >= count:
            return [int(item) for item in self._rng.choice(left, size=count, replace=False)]
        return left + list(itertools.islice(self._new_items, count - len(left)))
