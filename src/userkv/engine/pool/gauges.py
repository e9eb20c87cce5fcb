"""What a worker's pool backend says of itself, brought into the connector's figures."""

import time
from collections.abc import Callable

from userkv.engine.pool.stats import PoolStats
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

    def add_to(self, stats: PoolStats) -> None:
        """Add what has changed since the last time, if that is long enough ago."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + SECONDS
        counters = self._backend.counters()
        for theirs, ours in _COUNTERS.items():
            amount = counters.get(theirs, 0) - self._seen.get(theirs, 0)
            if amount:
                stats.count(**{ours: amount})
        self._seen = counters
        stats.set(pool_breaker_open=self._backend.breaker.state != "closed")
        try:
            usage = self._backend.usage()
        except StoreError:
            return  # Nobody knows; the breaker's figures say why.
        for tier, used, budget in usage:
            stats.set(**{f"pool_used_{tier.value}": used, f"pool_budget_{tier.value}": budget})
