"""What was located a moment ago, so that reading it needs no second question to the master."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from userkv.store.backend import Region, Tier

SECONDS = 3.0
"""Less than the lease that locating takes, during which the object stays where it is."""
MOST = 10_000


class Place(NamedTuple):
    """Where an object is; ``region`` if that is in memory that this process lends to the pool."""

    tier: Tier
    region: Region | None = None


class RecentPlaces:
    """Places by key, for a few seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Place, float]] = {}

    def note(self, keys: Sequence[str], places: Sequence[Place | None]) -> None:
        """Remember where objects were found just now."""
        until = self._clock() + SECONDS
        with self._lock:
            if len(self._known) > MOST:
                self._known.clear()
            for key, place in zip(keys, places, strict=True):
                if place is None:
                    self._known.pop(key, None)
                else:
                    self._known[key] = (place, until)

    def find(self, key: str) -> Place | None:
        """Where an object was found, if that is not too long ago."""
        with self._lock:
            place, until = self._known.get(key, (None, 0.0))
            return place if self._clock() < until else None

    def forget(self) -> None:
        """Forget everything: the pool is in trouble."""
        with self._lock:
            self._known.clear()
