"""Loads under way, and the records that are avoided since a load from them failed."""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from userkv.engine.pool.wire.messages import LoadJob
from userkv.records.load_plan import ExtentRead
from userkv.store.backend import Tier

AVOID_SECONDS = 30.0
"""How long a record is avoided from which a load failed, unless it is replaced before."""

MAX_AVOIDED = 10_000
"""How many such records are remembered."""


@dataclass(slots=True, eq=False)
class Load:
    """A load, until all ranks have reported it and after.

    Attributes:
        request_id: the request that needs it.
        user: the user's name in the pool, and the namespace of its KV.
        generation: of the record that it goes by.
        tier: where the KV comes from.
        counted_tokens: what to count as loaded if it succeeds.
        ranks_left: ranks that have not reported it.
        ok: no rank has failed so far.

    """

    request_id: str
    user: tuple[str, str]
    generation: int
    tier: Tier
    counted_tokens: int
    ranks_left: int = 0
    ok: bool = True


class PoolLoads:
    """All loads of an engine. Scheduler thread only.

    Args:
        num_ranks: ranks that report each load.
        clock: seconds, monotonic.

    """

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._job_ids = itertools.count(1)
        self._unshipped: list[LoadJob] = []
        self._running: dict[int, Load] = {}
        self._avoided: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()

    def start(self, load: Load, reads: Sequence[ExtentRead], block_ids: Sequence[int]) -> None:
        """Load extents into blocks, from the next step on."""
        load.ranks_left = self._num_ranks
        job = LoadJob(next(self._job_ids), load.request_id, *load.user, tuple(reads), tuple(block_ids))
        self._running[job.job_id] = load
        self._unshipped.append(job)
        self._counts["swapin_attempts"] += 1

    def ship(self) -> list[LoadJob]:
        """The jobs that workers shall begin with the step that is being scheduled."""
        jobs, self._unshipped = self._unshipped, []
        return jobs

    def report(self, reports: Mapping[int, tuple[int, bool]]) -> list[Load]:
        """Workers have ended loads: for each job, how many ranks, and whether all of them succeeded.

        Returns:
            The loads that have failed on one of these ranks, and those that all ranks have done well. See ``ok``.

        """
        changed = []
        for job_id, (ranks, ok) in reports.items():
            load = self._running[job_id]
            load.ranks_left -= ranks
            load.ok &= ok
            if not ok:
                self._avoid(load)
            if load.ranks_left == 0:
                del self._running[job_id]
                self._counts["swapin_successes"] += load.ok
                self._counts[f"swapin_tokens_{load.tier.value}"] += load.counted_tokens if load.ok else 0
            if not ok or (load.ok and load.ranks_left == 0):
                changed.append(load)
        return changed

    def avoids(self, user: tuple[str, str], generation: int) -> bool:
        """Whether a load from this generation of a user's record failed a short time ago."""
        avoided, until = self._avoided.get(user, (0, 0.0))
        return avoided == generation and self._clock() < until

    def take_counts(self) -> dict[str, int]:
        """How loads began and ended since the last call, by the names of the connector's counters."""
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def _avoid(self, load: Load) -> None:
        self._avoided[load.user] = (load.generation, self._clock() + AVOID_SECONDS)
        if len(self._avoided) > MAX_AVOIDED:
            self._avoided.popitem(last=False)
