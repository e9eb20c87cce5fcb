"""A pool for the oracle: it keeps what each KV slot held, answers late, loses things, and fails on demand.

It stands in for the RPC client and for the workers' half; the connector and its scheduler half are the real ones.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, NOT_IN_POOL, PoolCommitResult, PoolLookupResult
from userkv.engine.pool.wire.messages import LoadJob, SaveJob, StepJobs
from userkv.records.load_plan import usable_part
from userkv.records.record import Extent, UserRecord
from userkv.store.backend import Tier

Slots = dict[tuple[int, int], Any]
User = tuple[str, str]


class OraclePool:
    """Users' records, and the slots of their extents' blocks.

    Args:
        block_size: tokens per block.
        slots: the engine's KV: what (block, slot) holds.
        random: decides when things happen.

    """

    num_ranks = 1

    def __init__(self, block_size: int, slots: Slots, random: Random) -> None:
        self.down = False
        self.failing_loads = False
        self.failing_saves = False
        self.saves_written = 0
        self.blocks_written = 0
        self.loads_done = 0
        self.records: dict[User, UserRecord] = {}
        self.extents: dict[tuple[str, str, int], list[list[Any]]] = {}
        self._block_size = block_size
        self._slots = slots
        self._random = random
        self._answers: deque[Callable[[], None]] = deque()
        self._loads: list[LoadJob] = []
        self._saves: list[SaveJob] = []
        self.on_saved: Callable[[int, bool], None] = lambda job_id, ok: None

    # What the scheduler's half calls.

    def lookup(self, uid: str, namespace: str, done: Callable[[PoolLookupResult], None], **how: bool) -> None:
        self._answers.append(lambda: done(self._look(uid, namespace)))

    def commit(
        self,
        uid: str,
        namespace: str,
        record: UserRecord,
        base_generation: int,
        done: Callable[[PoolCommitResult], None],
    ) -> None:
        self._answers.append(lambda: done(self._commit((uid, namespace), record, base_generation)))

    def remove(self, uid: str, namespace: str, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self.extents.pop((uid, namespace, extent.extent_id), None)

    def close(self) -> None:
        """Nothing to close."""

    # What happens to it.

    def deliver(self, everything: bool = False) -> None:
        """Let some of the answers arrive that are on their way."""
        while self._answers and (everything or self._random.random() < 0.6):
            self._answers.popleft()()

    def lose(self) -> None:
        """Lose an extent, or a record: eviction is legal at any time."""
        if self.extents and self._random.random() < 0.7:
            self.extents.pop(self._random.choice(sorted(self.extents)))
        elif self.records:
            self.records.pop(self._random.choice(sorted(self.records)))

    @property
    def quiet(self) -> bool:
        return not (self._answers or self._loads or self._saves)

    # What a worker does in a step.

    def start_step(self, jobs: StepJobs, sync: bool) -> tuple[dict[int, bool], set[int]]:
        """Take the step's jobs; with ``sync``, do its loads at once. Returns ended loads and bad blocks."""
        self._saves += jobs.saves
        self._loads += jobs.loads
        return self._do_loads(list(self._loads))[:2] if sync else ({}, set())

    def end_step(self, everything: bool) -> tuple[dict[int, bool], set[int], set[str]]:
        """Do some of what waits, in any order. Returns ended loads, bad blocks and received requests."""
        for job in list(self._saves):
            if job.during_forward or everything or self._random.random() < 0.5:
                self._saves.remove(job)
                self._save(job)
        return self._do_loads([job for job in self._loads if everything or self._random.random() < 0.5])

    def _do_loads(self, jobs: list[LoadJob]) -> tuple[dict[int, bool], set[int], set[str]]:
        ended: dict[int, bool] = {}
        bad: set[int] = set()
        for job in jobs:
            self._loads.remove(job)
            self.loads_done += 1
            failed_at = self._load(job)
            ended[job.job_id] = failed_at is None
            if failed_at is not None:
                rest = {i for read in job.reads[failed_at:] for i in read.wanted if i is not None}
                bad |= {job.block_ids[i] for i in rest}
                for block in bad:
                    for slot in range(self._block_size):
                        self._slots.pop((block, slot), None)
        return ended, bad, {job.request_id for job in jobs}

    def _load(self, job: LoadJob) -> int | None:
        for at, read in enumerate(job.reads):
            stored = self.extents.get((job.uid, job.namespace, read.extent.extent_id))
            broken = stored is None or self.down or (self.failing_loads and self._random.random() < 0.5)
            for index, target in enumerate(read.wanted):
                if target is None:
                    continue
                for slot in range(self._block_size):
                    # A load that fails leaves anything behind.
                    value = None if broken or stored is None else stored[index][slot]
                    self._slots.pop((job.block_ids[target], slot), None)
                    if value is not None:
                        self._slots[job.block_ids[target], slot] = value
            if broken:
                return at
        return None

    def _save(self, job: SaveJob) -> None:
        ok = not self.down and not (self.failing_saves and self._random.random() < 0.5)
        if ok:
            self.saves_written += 1
            for extent, block_ids in job.extents:
                self.blocks_written += len(block_ids)
                self.extents[job.uid, job.namespace, extent.extent_id] = [
                    [self._slots.get((block, slot)) for slot in range(self._block_size)] for block in block_ids
                ]
        self.on_saved(job.job_id, ok)

    def _look(self, uid: str, namespace: str) -> PoolLookupResult:
        if self.down:
            return LOOKUP_FAILED
        record = self.records.get((uid, namespace))
        if record is None:
            return NOT_IN_POOL
        present = [(uid, namespace, extent.extent_id) in self.extents for extent in record.extents]
        return PoolLookupResult(True, record, usable_part(record, present) if present else None, Tier.DRAM)

    def _commit(self, user: User, record: UserRecord, base_generation: int) -> PoolCommitResult:
        if self.down:
            return PoolCommitResult(committed=False)
        current = self.records.get(user)
        generation = 0 if current is None else current.generation
        if base_generation and generation != base_generation:
            return PoolCommitResult(committed=False, refused=True)
        self.records[user] = replace(record, generation=max(generation, base_generation) + 1)
        named = set(record.extents)
        return PoolCommitResult(True, garbage=tuple(e for e in (current.extents if current else ()) if e not in named))
