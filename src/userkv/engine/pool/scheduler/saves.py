"""All saves under way: from a history that is complete in HBM to a record that names it in the pool.

The blocks of a history are held (one reference each) from the first moment of its save to the last, so that HBM may
evict the user meanwhile. A save that fails anywhere costs nothing but the save. The states are in ``save_state.py``.
"""

import itertools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from userkv.cache.block_table import BlockPool
from userkv.core.request import UserKey
from userkv.engine.pool.scheduler.pool_client import PoolClient, PoolCommitResult, PoolLookupResult
from userkv.engine.pool.scheduler.save import History, Save
from userkv.engine.pool.scheduler.save_state import SAVE_TRANSITIONS, SaveEvent, SaveState
from userkv.engine.pool.wire.messages import SaveJob
from userkv.records.save_plan import plan_save

FREE_SOON_SECONDS = 1.0
"""How long requests wait for blocks that a save holds, rather than being preempted."""


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """Limits and constants of an engine's saves.

    Attributes:
        block_size: tokens per block.
        max_extent_blocks: blocks of the largest extent.
        max_saves: saves under way at most; more are dropped.
        max_held_blocks: blocks that all saves may hold together; one save alone may exceed it.
        ttl_seconds: when records expire; 0 = never.
        writer: name of this engine in its records, for operators.

    """

    block_size: int
    max_extent_blocks: int
    max_saves: int
    max_held_blocks: int
    ttl_seconds: float
    writer: str


class PoolSaves:
    """All saves of an engine.

    The pool answers and the ranks report on the RPC client's thread, so that saves end while the engine is idle.
    All other methods belong to the scheduler's thread, which alone touches the block pool.

    Args:
        pool: where records and extents go.
        block_pool: vLLM's block pool.
        settings: limits.

    """

    def __init__(self, pool: PoolClient, block_pool: BlockPool, settings: SaveSettings) -> None:
        self._pool = pool
        self._block_pool = block_pool
        self._settings = settings
        self._counts: Counter[str] = Counter()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._saves: dict[int, Save] = {}
        self._by_user: dict[tuple[str, str], int] = {}
        self._planned: deque[Save] = deque()
        self._to_release: deque[tuple[Any, ...]] = deque()
        self._ended: deque[tuple[UserKey, bool]] = deque()

    def __len__(self) -> int:
        return len(self._saves)

    def is_saving(self, uid: str, namespace: str) -> bool:
        """Whether a save of this user is under way."""
        return (uid, namespace) in self._by_user

    def start(self, history: History, answer: PoolLookupResult | None, *, during_forward: bool = False) -> Save | None:
        """Begin to save a history.

        Args:
            history: its blocks must be referenced right now.
            answer: what the pool has said of the user just now, if it was asked.
            during_forward: write layer by layer while the next step computes; commit only after :meth:`confirm`.

        Returns:
            The save; ``None`` if it is dropped, or if one of this user is under way already.

        """
        with self._lock:
            if self.is_saving(history.uid, history.namespace):
                return None
            held = sum(len(other.held) for other in self._saves.values())
            # A pool that is slow, or hangs, must not take HBM away from the requests.
            too_much = held > 0 and held + len(history.blocks) > self._settings.max_held_blocks
            if len(self._saves) >= self._settings.max_saves or too_much:
                self._counts["dropped_saves"] += 1
                return None
            save = Save(next(self._ids), history, during_forward, held=history.blocks)
            self._saves[save.job_id] = save
            self._by_user[save.user] = save.job_id
        self._block_pool.touch(save.held)
        if answer is not None and answer.succeeded:
            self._plan(save, answer)
        else:
            self._pool.lookup(*save.user, lambda found: self._plan(save, found), background=True)
        return save

    def count_unneeded(self) -> None:
        """Count a history that need not be saved, since the pool has it already."""
        with self._lock:
            self._counts["unneeded_saves"] += 1

    def ship(self) -> list[SaveJob]:
        """The jobs to send with this step."""
        jobs = []
        while self._planned:
            save = self._planned.popleft()
            if save.state is not SaveState.PLANNED:
                continue  # It was cancelled meanwhile.
            assert save.plan is not None
            first = save.plan.new_extents[0].first_block
            # What is in the pool already need not be held any longer.
            self._block_pool.free_blocks(reversed(save.held[:first]))
            save.held = save.held[first:]
            self._advance(save, SaveEvent.SHIPPED_DURING_FORWARD if save.during_forward else SaveEvent.SHIPPED)
            jobs.append(save.make_job(save.plan, self._settings.block_size))
        return jobs

    def has_unshipped(self) -> bool:
        """Whether a step is needed for saves to go on, although no request may need one."""
        with self._lock:
            return any(save.state.waits_for_step for save in self._saves.values())

    def frees_blocks_soon(self) -> bool:
        """Whether blocks will be free soon, whatever the requests do; false for saves that take unusually long."""
        if self._to_release:
            return True
        since = time.monotonic() - FREE_SOON_SECONDS
        with self._lock:
            return any(save.started_at > since for save in self._saves.values())

    def confirm(self, save: Save) -> None:
        """The step during which ``save`` was written has computed what it should."""
        self._advance(save, SaveEvent.STEP_CONFIRMED)

    def cancel(self, save: Save) -> None:
        """Keep what ``save`` writes from becoming visible, unless its commit is under way."""
        self._advance(save, SaveEvent.CANCELLED)

    def cancel_all(self) -> None:
        """Cancel all saves and release their blocks at once: the weights have changed.

        Workers may still read the blocks; what they write then is never committed, and removed.
        """
        with self._lock:
            cancelled = list(self._saves.values())
            for save in cancelled:
                self._to_release.append(save.held)
                save.held = ()
        for save in cancelled:
            self.cancel(save)
        self.release()

    def release(self) -> None:
        """Release the blocks of saves that are over."""
        while self._to_release:
            self._block_pool.free_blocks(reversed(self._to_release.popleft()))

    def report_write(self, job_id: int, ok: bool, dropped: bool = False) -> None:
        """A rank has written its part of a job, failed, or dropped it for lack of room. RPC client's thread."""
        with self._lock:
            save = self._saves.get(job_id)
            if save is None or not save.state.is_written_by_ranks:
                return
            save.ranks_left -= 1
            is_last = save.ranks_left == 0
        events = [] if ok else [SaveEvent.RANK_DROPPED if dropped else SaveEvent.RANK_FAILED]
        self._advance(save, *events, *([SaveEvent.RANKS_DONE] if is_last else []))

    def take_ended(self) -> list[tuple[UserKey, bool]]:
        """The users whose saves have ended since the last call, each with whether the pool has the history now."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def take_counts(self) -> dict[str, int]:
        """How saves ended since the last call, by the names of the connector's counters."""
        with self._lock:
            counts = dict(self._counts)
            self._counts.clear()
        return counts

    def held_blocks(self) -> list[Any]:
        """Every block that a save holds, once per reference; for tests."""
        with self._lock:
            held = [block for save in self._saves.values() for block in save.held]
            return held + [block for blocks in self._to_release for block in blocks]

    def _plan(self, save: Save, answer: PoolLookupResult) -> None:
        if not answer.succeeded:
            self._advance(save, SaveEvent.LOOKUP_FAILED)
            return
        save.base_generation = 0 if answer.record is None else answer.record.generation
        save.plan = plan_save(
            answer.usable,  # What was evicted is written again.
            save.history.tokens,
            self._settings.block_size,
            max_extent_blocks=self._settings.max_extent_blocks,
            # One random number for all: it is a call of the kernel.
            new_id=itertools.count(secrets.randbits(62)).__next__,
            writer=self._settings.writer,
            now=time.time(),
            ttl_seconds=self._settings.ttl_seconds,
        )
        if save.plan is None or not save.plan.new_extents:
            self._advance(save, SaveEvent.NOTHING_MISSING)
            return
        save.ranks_left = self._pool.num_ranks
        self._advance(save, SaveEvent.EXTENTS_MISSING)
        self._planned.append(save)

    def _advance(self, save: Save, *events: SaveEvent) -> None:
        """Move a save through the states that ``events`` lead to, and do what the last one asks for."""
        with self._lock:
            before = left = save.state
            for event in events:
                left, save.state = save.state, SAVE_TRANSITIONS.next(save.state, event)
            after = save.state
            if after is before:
                return
            if after.is_over:
                self._end(save)
        if after is SaveState.COMMITTING:
            self._commit(save)
        elif after.is_over and left.leaves_extents:
            assert save.plan is not None
            self._pool.remove(*save.user, save.plan.new_extents)

    def _end(self, save: Save) -> None:
        del self._saves[save.job_id]
        del self._by_user[save.user]
        self._to_release.append(save.held)
        save.held = ()
        self._counts[f"{save.state.value}_saves"] += 1
        self._ended.append((save.history.key, save.state in (SaveState.COMMITTED, SaveState.UNNEEDED)))

    def _commit(self, save: Save) -> None:
        assert save.plan is not None
        new_extents = save.plan.new_extents

        def committed(answer: PoolCommitResult) -> None:
            # A commit without an answer may have happened: then what it names must stay.
            garbage: Sequence[Any] = (*answer.garbage, *new_extents) if answer.refused else answer.garbage
            self._pool.remove(*save.user, garbage)
            self._advance(save, SaveEvent.COMMIT_DONE if answer.committed else SaveEvent.COMMIT_FAILED)

        self._pool.commit(*save.user, save.plan.record, save.base_generation, committed)
