"""What was located a moment ago, so that reading it needs no second question to the master."""

import threading
import time
from collections.abc import Callable, Sequence

from userkv.store.backend import Tier

SECONDS = 3.0
"""Less than the lease that locating takes, during which the object stays where it is."""
MOST = 10_000


class RecentTiers:
    """Tiers by key, for a few seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Tier, float]] = {}

    def note(self, keys: Sequence[str], tiers: Sequence[Tier | None]) -> None:
        """Remember where objects were found just now."""
        until = self._clock() + SECONDS
        with self._lock:
            if len(self._known) > MOST:
                self._known.clear()
            for key, tier in zip(keys, tiers, strict=True):
                if tier is None:
                    self._known.pop(key, None)
                else:
                    self._known[key] = (tier, until)

    def tier(self, key: str) -> Tier | None:
        """Where an object was found, if that is not too long ago."""
        with self._lock:
            tier, until = self._known.get(key, (None, 0.0))
            return tier if self._clock() < until else None

    def forget(self) -> None:
        """Forget everything: objects were removed, or the pool is in trouble."""
        with self._lock:
            self._known.clear()
