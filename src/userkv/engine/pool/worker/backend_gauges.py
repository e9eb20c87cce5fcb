"""What a worker's pool backend says of itself, brought into the connector's figures."""

import time
from collections.abc import Callable

from userkv.engine.pool.metrics import PoolStats
from userkv.store.backend import StoreError
from userkv.store.guarded import GuardedBackend

SECONDS = 1.0
"""How often the backend is asked."""

_COUNTERS = {
    "dram_evictions": "pool_evictions_dram",
    "ssd_evictions": "pool_evictions_ssd",
    "corrupt_objects": "pool_corrupt_objects",
    "ssd_write_errors": "pool_ssd_errors",
    "ssd_read_errors": "pool_ssd_errors",
    "breaker_openings": "pool_breaker_openings",
}
"""The backends' names and ours; what backends count beside these is for their own tests."""


class PoolGauges:
    """Reads a backend now and then. Not thread-safe.

    Args:
        backend: what to read.
        clock: seconds, monotonic.

    """

    def __init__(self, backend: GuardedBackend, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self._next = 0.0
        self._seen: dict[str, int] = {}
        self._gauges: dict[str, float] = {}

    def add_to(self, stats: PoolStats) -> None:
        """Add what has been counted since the last time, and how things are: always, since ranks are added up."""
        if self._clock() >= self._next:
            self._next = self._clock() + SECONDS
            self._read(stats)
        stats.set(**self._gauges)

    def _read(self, stats: PoolStats) -> None:
        counters = self._backend.counters()
        for theirs, ours in _COUNTERS.items():
            amount = counters.get(theirs, 0) - self._seen.get(theirs, 0)
            if amount:
                stats.count(**{ours: amount})
        self._seen = counters
        self._gauges = {"pool_breaker_open": self._backend.breaker.state != "closed"}
        try:
            usage = self._backend.usage()
        except StoreError:
            return  # Nobody knows; the breaker's figures say why.
        for tier, used, budget in usage:
            self._gauges |= {f"pool_used_{tier.value}": used, f"pool_budget_{tier.value}": budget}
