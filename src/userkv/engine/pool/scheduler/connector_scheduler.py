"""The connector in the scheduler: what to load, what to save, and when.

It decides nothing about bytes: it asks the pool (through :class:`PoolClient`, which never blocks), keeps its answers by
request, and turns them into jobs for the workers. Scheduler thread only, but for the callbacks that say so.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from userkv.cache.block_table import UserEntry
from userkv.cache.user_cache import CacheRequest, UserCache
from userkv.core.request import UserKey
from userkv.engine.pool.metrics import PoolStats
from userkv.engine.pool.scheduler.history_saver import HistorySaver
from userkv.engine.pool.scheduler.loads import Load, PoolLoads
from userkv.engine.pool.scheduler.pool_client import PoolClient, PoolLookupResult
from userkv.engine.pool.scheduler.pool_request import MOST_QUESTIONS, PoolRequest
from userkv.engine.pool.scheduler.saves import History, PoolSaves
from userkv.engine.pool.wire.messages import StepJobs
from userkv.records.keys import pool_uid
from userkv.records.load_plan import plan_load
from userkv.store.backend import Tier


class ConnectorScheduler:
    """What the connector does in the scheduler's process. Implements :class:`UserCacheListener`.

    Args:
        pool: asks all ranks.
        users: the users in HBM.
        saves: saves under way; ``None`` if this engine saves nothing.
        keeper: starts them; ``None`` likewise.
        block_size: tokens per block.
        namespace_of: the namespace of a user's KV right now, given his adapter's number; "" = leave the pool alone.
        new_weights: makes ``namespace_of`` answer with other names from now on.
        loads: whether this engine loads anything.
        load_async: load between steps (otherwise within the step that needs the KV).
        save_during_forward: save layer by layer, in the step that completes a history.
        clock: seconds, monotonic.

    """

    def __init__(
        self,
        pool: PoolClient,
        users: UserCache,
        saves: PoolSaves | None,
        keeper: HistorySaver | None,
        block_size: int,
        namespace_of: Callable[[UserKey, int], str],
        new_weights: Callable[[], None],
        *,
        loads: bool = True,
        load_async: bool = True,
        save_during_forward: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts: Counter[str] = Counter()
        self._pool = pool
        self._users = users
        self._saves = saves
        self._keeper = keeper
        self._block_size = block_size
        self._namespace_of = namespace_of
        self._new_weights = new_weights
        self._may_load = loads
        self._loads = PoolLoads(pool.num_ranks, clock)
        self._load_async = load_async
        self._save_during_forward = save_during_forward
        self._clock = clock
        self._requests: dict[str, PoolRequest] = {}
        self._over: list[str] = []

    def new_request(self, request_id: str, lookup: CacheRequest, num_tokens: int, adapter_id: int = 0) -> None:
        """A request has arrived: ask the pool early, unless HBM has all that it could hit."""
        asking = PoolRequest(lookup, adapter_id, pool_uid(lookup.key), self._namespace_of(lookup.key, adapter_id))
        self._requests[request_id] = asking
        in_hbm = lookup.held_by(self._users.table.get(lookup.key))
        asking.in_hbm = in_hbm == len(lookup.history)
        if self._reads_pool(asking) and in_hbm < asking.wanted(num_tokens):
            asking.ask(self._pool, self._block_size, self._clock())

    def find(self, request_id: str, num_tokens: int, aligned_local: int) -> int | None:
        """How many tokens to load behind the first ``aligned_local``, which HBM has.

        Returns:
            0 if the pool has no more than HBM; ``None`` while the pool has not answered.

        """
        asking = self._requests.get(request_id)
        # Whoever has loaded once, well or not, computes the rest: nothing is tried again and again.
        if asking is None or not self._reads_pool(asking) or asking.load is not None:
            return 0
        wanted = asking.wanted(num_tokens)
        local = max(aligned_local, self._users.found_tokens(request_id))
        if local >= wanted:
            return 0
        if asking.must_ask(now := self._clock()):
            asking.ask(self._pool, self._block_size, now)
        answer = asking.answer
        if answer is None:
            return None
        hit = min(asking.common, wanted)
        if hit < wanted and self._may_have_since(asking) > max(hit, local):
            # Another request of this user was computed and saved while this one waited, and may have left HBM.
            asking.ask(self._pool, self._block_size, now)
            return None
        record = answer.usable
        if record is None or hit <= local or self._loads.is_bad(asking.user, record.generation):
            return 0
        asking.first_block, asking.hit_tokens = aligned_local // self._block_size, hit
        return hit - aligned_local

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request has its blocks, and will have ``num_external_tokens`` from the pool."""
        asking = self._requests.get(request_id)
        if asking is None or asking.load is not None:
            return
        answer = asking.answer
        first_start, asking.started = not asking.started, True
        if first_start and answer is not None:
            found = (
                (answer.tier or Tier.DRAM).value if num_external_tokens else "miss" if answer.succeeded else "failed"
            )
            self._counts[f"pool_lookups_{found}"] += 1
        if num_external_tokens == 0:
            self._check_pool(asking)
            return
        assert answer is not None
        assert answer.usable is not None
        first, end = asking.first_block, -(-asking.hit_tokens // self._block_size)
        whole = first == 0 and end == -(-asking.common // self._block_size)
        reads = asking.reads if whole else plan_load(answer.usable, first, end - first)
        # A request's history counts once, with what it started from first; see UserCacheStats.
        counted = num_external_tokens if first_start else 0
        tier = answer.tier or Tier.DRAM
        if first_start:
            asking.lookup.tiers[tier.value] = num_external_tokens
        asking.load = Load(request_id, asking.user, answer.usable.generation, tier, counted)
        self._loads.start(asking.load, reads, block_ids[first:end])

    def hit_tier(self, request_id: str) -> Tier | None:
        """Where the tokens that a request loads come from."""
        asking = self._requests.get(request_id)
        return asking.answer.tier if asking is not None and asking.answer is not None else None

    def step_computes(self, request_id: str, start: int, end: int, blocks: Sequence[Any]) -> None:
        """The step being scheduled computes tokens ``start`` to ``end`` of a request, in ``blocks``.

        If those are the last of its history, it is saved layer by layer while that happens.
        """
        asking = self._requests.get(request_id)
        if not self._save_during_forward or self._saves is None or asking is None or asking.save is not None:
            return
        lookup, answer = asking.lookup, self._trusted_answer(asking)
        if not start < len(lookup.history) <= end:
            return
        if lookup.request.write and asking.namespace and answer is not None and answer.succeeded:
            held = tuple(blocks[: -(-len(lookup.history) // self._block_size)])
            history = History(lookup.key, asking.uid, asking.namespace, lookup.history, held)
            asking.save = self._saves.start(history, answer, during_forward=True)

    def take_jobs(self) -> StepJobs:
        """What the workers shall do with the step that is being scheduled."""
        jobs = StepJobs(self._loads.ship())
        if self._saves is not None and self._keeper is not None:
            self._keeper.step()
            jobs.saves = self._saves.ship()
            self._saves.release()
        while self._over:
            self._requests.pop(self._over.pop(), None)
        return jobs

    def holds_blocks(self) -> bool:
        """Whether saves hold blocks that they will let go of, whatever the requests do."""
        return self._saves is not None and self._saves.holds_blocks()

    def needs_step(self) -> bool:
        """Whether saves wait for a step to go on with, even if no request does."""
        if self._saves is None or self._keeper is None:
            return False
        return self._keeper.needs_step() or self._saves.has_unshipped()

    def loaded(self, reports: Mapping[int, tuple[int, bool]]) -> None:
        """Workers have ended loads: for each job, how many ranks, and whether all of them succeeded."""
        for load in self._loads.ended(reports):
            asking = self._requests.get(load.request_id)
            if asking is not None:
                asking.lookup.tiers.pop(load.tier.value, None)
                self._cancel_save(asking)

    def take_stats(self) -> PoolStats | None:
        """Figures since the last call; ``None`` if nothing has happened, as in most steps."""
        sources = [self._counts, self._loads.counts]
        if self._saves is not None:
            sources.append(self._saves.counts)
        if not any(sources):
            return None
        counts = {**self._counts, **self._loads.take_counts()}
        self._counts.clear()
        if self._saves is not None:
            counts.update(self._saves.take_counts())
        stats = PoolStats()
        stats.count(**counts)
        return stats

    def finished(self, request_id: str) -> None:
        """The request is over: done, aborted or refused. Its history may be kept after this, but in the same step."""
        self._over.append(request_id)

    def on_history_cached(self, request_id: str, key: UserKey, entry: UserEntry) -> None:
        asking = self._requests.get(request_id)
        if self._saves is None or self._keeper is None or asking is None or not asking.namespace:
            return
        if asking.save is not None:
            save, asking.save = asking.save, None
            self._keeper.written(key, entry)
            self._saves.confirm(save)
            return
        answer = self._trusted_answer(asking)
        held = answer is not None and asking.holds_all(answer, time.time())
        self._keeper.save(asking.history(entry), entry, answer, held=held)

    def on_request_stopped(self, request_id: str) -> None:
        asking = self._requests.get(request_id)
        if asking is not None:
            # Nobody will confirm that the step computed what it should; and what is held may be needed to go on.
            self._cancel_save(asking)

    def on_cache_reset(self) -> None:
        self._new_weights()
        if self._keeper is not None and self._saves is not None:
            self._keeper.forget()
            # vLLM resets its own prefix cache next, and does not if anybody holds a block.
            self._saves.abandon()
        for asking in self._requests.values():
            # What runs goes on with the KV it has, and nothing of it is kept. What waits asks under the new name.
            asking.rename("" if asking.started else self._namespace_of(asking.lookup.key, asking.adapter_id))
            self._cancel_save(asking)

    def _check_pool(self, asking: PoolRequest) -> None:
        entry = self._users.table.get(asking.lookup.key)
        may_save = asking.namespace and asking.lookup.request.write
        if self._keeper is not None and entry is not None and asking.in_hbm and may_save:
            self._keeper.check(asking.history(entry), entry)

    def _may_have_since(self, asking: PoolRequest) -> int:
        """How many tokens of the user the pool may have by now, since a save has ended after it was asked."""
        if self._keeper is None or asking.times_asked >= MOST_QUESTIONS:
            return 0  # Nobody waits for ever for a user who is saved again and again.
        return self._keeper.saved_since(asking.lookup.key, asking.asked_at)

    def _trusted_answer(self, asking: PoolRequest) -> PoolLookupResult | None:
        """What the pool said of the user, unless something newer is known: a load that failed, a save that ended."""
        failed = asking.load is not None and not asking.load.ok
        if failed or self._keeper is None or not self._keeper.trusts(asking.lookup.key, asking.asked_at):
            return None
        return asking.answer

    def _cancel_save(self, asking: PoolRequest) -> None:
        if asking.save is not None and self._saves is not None:
            self._saves.cancel(asking.save)
            asking.save = None

    def _reads_pool(self, asking: PoolRequest) -> bool:
        return self._may_load and asking.lookup.request.read and bool(asking.namespace)
