"""Saves under way: from a history that is complete in HBM to a record that names it in the pool.

Life of a save: look the user up, plan what is missing, ship the job with a step, wait until all ranks have written,
commit the record, clean up. The blocks are held (one reference each) from the first moment to the last, so that HBM may
evict the user meanwhile. A save that fails anywhere costs nothing but the save.
"""

import itertools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from userkv.cache.block_table import BlockPool
from userkv.core.request import UserKey
from userkv.core.tokens import TokenArray
from userkv.engine.pool.scheduler.pool_client import PoolClient, PoolCommitResult, PoolLookupResult
from userkv.engine.pool.wire.messages import SaveJob
from userkv.records.save_plan import SavePlan, plan_save

PRESENTLY_SECONDS = 1.0
"""How long requests wait for blocks that a save holds, rather than being preempted."""


@dataclass(frozen=True, slots=True)
class History:
    """A history whose KV is in HBM.

    Attributes:
        key: the user, as HBM knows him.
        uid: the user, as the pool knows him.
        namespace: model and weights that computed the KV.
        tokens: the history.
        blocks: vLLM's blocks that hold it, in order.

    """

    key: UserKey
    uid: str
    namespace: str
    tokens: TokenArray
    blocks: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Save:
    """One save. Its fields change under the lock of :class:`PoolSaves`."""

    job_id: int
    history: History
    during_forward: bool
    plan: SavePlan | None = None
    base_generation: int = 0
    held: tuple[Any, ...] = ()
    started_at: float = field(default_factory=time.monotonic)
    ranks_left: int = 0
    failed: bool = False
    dropped: bool = False
    confirmed: bool = True
    shipped: bool = False
    closing: bool = False


class PoolSaves:
    """All saves of an engine.

    :meth:`start`, :meth:`ship`, :meth:`release` and :meth:`has_unshipped` belong to the scheduler's thread, which alone
    touches the block pool; the rest happens on the RPC client's thread, so that saves end while the engine is idle.

    Args:
        pool: where records and extents go.
        block_pool: vLLM's block pool.
        block_size: tokens per block.
        max_extent_blocks: blocks of the largest extent.
        max_saves: saves under way at most; more are dropped.
        max_held_blocks: blocks that all of them may hold; one save alone may exceed it.
        ttl_seconds: when records expire; 0 = never.
        writer: who commits, for operators.

    Attributes:
        ended: told of each save that ends, with the outcome; on either thread.
        counts: how saves ended since the last :meth:`take_counts`.

    """

    def __init__(
        self,
        pool: PoolClient,
        block_pool: BlockPool,
        block_size: int,
        max_extent_blocks: int,
        max_saves: int,
        max_held_blocks: int,
        ttl_seconds: float,
        writer: str,
    ) -> None:
        self.ended: Callable[[Save, bool], None] = lambda save, ok: None
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._block_pool = block_pool
        self._block_size = block_size
        self._max_extent_blocks = max_extent_blocks
        self._max_saves = max_saves
        self._max_held_blocks = max_held_blocks
        self._ttl_seconds = ttl_seconds
        self._writer = writer
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._saves: dict[int, Save] = {}
        self._by_user: dict[tuple[str, str], int] = {}
        self._ready: deque[Save] = deque()
        self._to_release: deque[tuple[Any, ...]] = deque()

    def __len__(self) -> int:
        return len(self._saves)

    def is_saving(self, uid: str, namespace: str) -> bool:
        """Whether a save of this user is under way."""
        return (uid, namespace) in self._by_user

    def start(self, history: History, answer: PoolLookupResult | None, *, during_forward: bool = False) -> Save | None:
        """Begin to save a history.

        Args:
            history: its blocks must be referenced by somebody right now.
            answer: what the pool has said of the user just now, if he was asked for.
            during_forward: write layer by layer while the next step computes; commit only after :meth:`confirm`.

        Returns:
            The save; ``None`` if it is dropped, or if one of this user is under way already.

        """
        user = (history.uid, history.namespace)
        with self._lock:
            if user in self._by_user:
                return None
            held = sum(len(other.held) for other in self._saves.values())
            # A pool that is slow, or hangs, must not take HBM away from the requests.
            too_much = held > 0 and held + len(history.blocks) > self._max_held_blocks
            if len(self._saves) >= self._max_saves or too_much:
                self.counts["dropped_saves"] += 1
                return None
            save = Save(next(self._ids), history, during_forward, held=history.blocks, confirmed=not during_forward)
            self._saves[save.job_id] = save
            self._by_user[user] = save.job_id
        self._block_pool.touch(save.held)
        if answer is not None and answer.succeeded:
            self._plan(save, answer)
        else:
            self._pool.lookup(history.uid, history.namespace, lambda found: self._plan(save, found), background=True)
        return save

    def unneeded(self) -> None:
        """A history that the pool has already need not be saved."""
        with self._lock:
            self.counts["unneeded_saves"] += 1

    def ship(self) -> list[SaveJob]:
        """The jobs to send with this step."""
        jobs = []
        while self._ready:
            save = self._ready.popleft()
            assert save.plan is not None
            if save.failed:
                self._end(save, False, "failed_saves")
                continue
            first = save.plan.new_extents[0].first_block
            # What is in the pool already need not be held any longer.
            self._block_pool.free_blocks(reversed(save.held[:first]))
            save.held = save.held[first:]
            save.shipped = True
            jobs.append(self._job(save, save.plan))
        return jobs

    def has_unshipped(self) -> bool:
        """Whether a step is needed, although nothing else may ask for one, for saves to go on."""
        with self._lock:
            return any(not save.shipped for save in self._saves.values())

    def holds_blocks(self) -> bool:
        """Whether blocks will be let go of presently. A save that takes longer than usual is not waited for."""
        if self._to_release:
            return True
        since = time.monotonic() - PRESENTLY_SECONDS
        with self._lock:
            return any(save.started_at > since for save in self._saves.values())

    def abandon(self) -> None:
        """Let go of all blocks at once: what is being saved is not valid any more.

        Workers may still read the blocks; what comes of it is never committed, and removed.
        """
        with self._lock:
            abandoned = list(self._saves.values())
            for save in abandoned:
                save.failed = save.confirmed = True
                self._to_release.append(save.held)
                save.held = ()
        for save in abandoned:
            self._go_on(save)
        self.release()

    def release(self) -> None:
        """Let go of the blocks of saves that have ended."""
        while self._to_release:
            self._block_pool.free_blocks(reversed(self._to_release.popleft()))

    def take_counts(self) -> dict[str, int]:
        """How saves ended since the last call."""
        with self._lock:
            counts = dict(self.counts)
            self.counts.clear()
        return counts

    def saved(self, job_id: int, ok: bool, dropped: bool = False) -> None:
        """A rank has ended its part of a job, or dropped it because too many wait."""
        with self._lock:
            save = self._saves.get(job_id)
            if save is None:
                return
            save.ranks_left -= 1
            save.failed |= not ok
            save.dropped |= dropped
        self._go_on(save)

    def confirm(self, save: Save) -> None:
        """The step during which ``save`` was written has computed what it should."""
        with self._lock:
            save.confirmed = True
        self._go_on(save)

    def cancel(self, save: Save) -> None:
        """What ``save`` writes is not to become visible."""
        with self._lock:
            save.failed = save.confirmed = True
        self._go_on(save)

    def held_blocks(self) -> list[Any]:
        """Every block that a save holds, once per reference; for tests."""
        with self._lock:
            held = [block for save in self._saves.values() for block in save.held]
            return held + [block for blocks in self._to_release for block in blocks]

    def _plan(self, save: Save, answer: PoolLookupResult) -> None:
        if save.failed or not answer.succeeded:
            self._end(save, False, "failed_saves")
            return
        history = save.history
        save.base_generation = 0 if answer.record is None else answer.record.generation
        save.plan = plan_save(
            answer.usable,  # What was evicted is written again.
            history.tokens,
            self._block_size,
            max_extent_blocks=self._max_extent_blocks,
            # One random number for all: it is a call of the kernel.
            new_id=itertools.count(secrets.randbits(62)).__next__,
            writer=self._writer,
            now=time.time(),
            ttl_seconds=self._ttl_seconds,
        )
        if save.plan is None or not save.plan.new_extents:
            self._end(save, True, "unneeded_saves")
            return
        save.ranks_left = self._pool.num_ranks
        self._ready.append(save)

    def _job(self, save: Save, plan: SavePlan) -> SaveJob:
        blocks, first = save.held, plan.new_extents[0].first_block
        ids = [block.block_id for block in blocks]
        partial = len(save.history.tokens) % self._block_size != 0
        return SaveJob(
            save.job_id,
            save.history.uid,
            save.history.namespace,
            tuple(
                (extent, tuple(ids[extent.first_block - first : extent.end_block - first]))
                for extent in plan.new_extents
            ),
            live_block=ids[-1] if partial or save.during_forward else -1,
            during_forward=save.during_forward,
        )

    def _go_on(self, save: Save) -> None:
        with self._lock:
            if save.ranks_left or not save.confirmed or not save.shipped or save.closing:
                return
            save.closing = True
        assert save.plan is not None
        history = save.history
        if save.failed:
            self._pool.remove(history.uid, history.namespace, save.plan.new_extents)
            self._end(save, False, "dropped_saves" if save.dropped else "failed_saves")
        else:
            self._pool.commit(
                history.uid,
                history.namespace,
                save.plan.record,
                save.base_generation,
                lambda answer: self._committed(save, answer),
            )

    def _committed(self, save: Save, answer: PoolCommitResult) -> None:
        assert save.plan is not None
        # A commit without an answer may have happened: then what it names must stay.
        garbage: Sequence[Any] = answer.garbage
        if answer.refused:
            garbage = (*garbage, *save.plan.new_extents)
        self._pool.remove(save.history.uid, save.history.namespace, garbage)
        self._end(save, answer.committed, "committed_saves" if answer.committed else "failed_saves")

    def _end(self, save: Save, ok: bool, count: str) -> None:
        with self._lock:
            del self._saves[save.job_id]
            del self._by_user[save.history.uid, save.history.namespace]
            self._to_release.append(save.held)
            save.held = ()
            self.counts[count] += 1
        self.ended(save, ok)
