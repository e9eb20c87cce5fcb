"""The connector in the scheduler: what to load, what to save, and when.

It moves no bytes. It asks the pool (through :class:`PoolClient`, which never blocks), keeps the answers by request, and
turns them into jobs for the workers. Scheduler thread only.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from userkv.cache.block_table import UserEntry
from userkv.cache.cache_request import CacheRequest
from userkv.cache.user_cache import UserCache
from userkv.core.request import UserKey
from userkv.engine.pool.metrics import PoolStats
from userkv.engine.pool.scheduler.history_saver import HistorySaver
from userkv.engine.pool.scheduler.loads import Load, PoolLoads
from userkv.engine.pool.scheduler.lookup import MAX_QUESTIONS, LookupAnswer
from userkv.engine.pool.scheduler.lookup_state import LookupState
from userkv.engine.pool.scheduler.namespace import Namespaces
from userkv.engine.pool.scheduler.pool_client import PoolClient
from userkv.engine.pool.scheduler.pool_request import PoolRequest
from userkv.engine.pool.scheduler.save import History
from userkv.engine.pool.wire.messages import StepJobs
from userkv.records.keys import pool_uid
from userkv.records.load_plan import plan_load
from userkv.store.backend import Tier


class ConnectorScheduler:
    """What the connector does in the scheduler's process. Implements :class:`UserCacheListener`.

    Args:
        pool: asks all ranks.
        users: the users in HBM.
        namespaces: names the KV of each user.
        saver: saves histories; ``None`` if this engine saves nothing.
        loads: whether this engine loads anything.
        save_during_forward: save layer by layer, in the step that completes a history.
        clock: seconds, monotonic.

    """

    def __init__(
        self,
        pool: PoolClient,
        users: UserCache,
        namespaces: Namespaces,
        saver: HistorySaver | None,
        *,
        loads: bool = True,
        save_during_forward: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts: Counter[str] = Counter()
        self._pool = pool
        self._users = users
        self._namespaces = namespaces
        self._saver = saver
        self._may_load = loads
        self._loads = PoolLoads(pool.num_ranks, clock)
        self._save_during_forward = save_during_forward
        self._clock = clock
        self._block_size = users.table.block_size
        self._requests: dict[str, PoolRequest] = {}
        self._finished: list[str] = []

    def add_request(self, request_id: str, cache_request: CacheRequest, num_tokens: int, adapter_id: int = 0) -> None:
        """A request has arrived: ask the pool early, unless HBM has all that it could hit."""
        key = cache_request.key
        in_hbm = cache_request.held_tokens(self._users.table.get(key))
        request = PoolRequest(
            cache_request,
            adapter_id,
            pool_uid(key),
            self._namespaces.of(key, adapter_id),
            in_hbm=in_hbm == len(cache_request.history),
        )
        self._requests[request_id] = request
        if self._reads_pool(request) and in_hbm < request.wanted(num_tokens):
            self._ask(request, self._clock())

    def find_loadable(self, request_id: str, num_tokens: int, aligned_local: int) -> int | None:
        """How many tokens to load behind the first ``aligned_local``, which HBM has.

        Returns:
            0 if the pool has no more than HBM; ``None`` while the pool has not answered.

        """
        request = self._requests.get(request_id)
        if request is None or not self._reads_pool(request) or not request.lookup.state.may_load:
            return 0
        wanted = request.wanted(num_tokens)
        local = max(aligned_local, self._users.last_hit(request_id))
        if local >= wanted:
            return 0
        if request.lookup.must_ask(now := self._clock()):
            self._ask(request, now)
        answer = request.lookup.answer
        if answer is None:
            return None
        hit = min(answer.common, wanted)
        if hit < wanted and self._saved_meanwhile(request) > max(hit, local):
            # Another request of this user was computed and saved while this one waited, and may have left HBM.
            self._ask(request, now)
            return None
        record = answer.result.usable
        if record is None or hit <= local or self._loads.avoids(request.user, record.generation):
            return 0
        request.first_block, request.hit_tokens = aligned_local // self._block_size, hit
        return hit - aligned_local

    def start_request(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request has its blocks, and will have ``num_external_tokens`` from the pool."""
        request = self._requests.get(request_id)
        if request is None or not request.lookup.state.may_load:
            return
        answer = request.lookup.answer
        is_first_start, request.started = not request.started, True
        if is_first_start and answer is not None:
            self._count_lookup(answer, num_external_tokens)
        if num_external_tokens == 0:
            self._recheck_pool(request)
            return
        assert answer is not None
        # A request's history counts once, with what it started from first; see UserCacheStats.
        self._start_load(request_id, request, answer, block_ids, num_external_tokens if is_first_start else 0)

    def hit_tier(self, request_id: str) -> Tier | None:
        """The tier that the tokens of a request come from which it loads."""
        request = self._requests.get(request_id)
        answer = request.lookup.answer if request is not None else None
        return answer.result.tier if answer is not None else None

    def save_during_step(self, request_id: str, start: int, end: int, blocks: Sequence[Any]) -> None:
        """The step being scheduled computes tokens ``start`` to ``end`` of a request, in ``blocks``.

        If those are the last of its history, it is saved layer by layer while that happens.
        """
        request = self._requests.get(request_id)
        if not self._save_during_forward or self._saver is None or request is None or request.save is not None:
            return
        key, tokens, answer = request.cache_request.key, request.cache_request.history, self._trusted_answer(request)
        if not start < len(tokens) <= end:
            return
        if request.writes_pool and answer is not None and answer.result.succeeded:
            held = tuple(blocks[: -(-len(tokens) // self._block_size)])
            history = History(key, *request.user, tokens, held)
            request.save = self._saver.save_during_forward(history, answer.result)

    def take_jobs(self) -> StepJobs:
        """What the workers shall do with the step that is being scheduled."""
        jobs = StepJobs(self._loads.ship(), self._saver.take_jobs() if self._saver is not None else [])
        while self._finished:
            self._requests.pop(self._finished.pop(), None)
        return jobs

    def frees_blocks_soon(self) -> bool:
        """Whether saves hold blocks that they will release soon, whatever the requests do."""
        return self._saver is not None and self._saver.frees_blocks_soon()

    def needs_step(self) -> bool:
        """Whether saves wait for a step to go on with, even if no request does."""
        return self._saver is not None and self._saver.needs_step()

    def report_loads(self, reports: Mapping[int, tuple[int, bool]]) -> None:
        """Workers have ended loads: for each job, how many ranks, and whether all of them succeeded."""
        for load in self._loads.report(reports):
            request = self._requests.get(load.request_id)
            if request is None:
                continue
            request.lookup.end_load(load.ok)
            if not load.ok:
                request.cache_request.tiers.pop(load.tier.value, None)
                self._cancel_save(request)

    def take_stats(self) -> PoolStats | None:
        """Figures since the last call; ``None`` if nothing has happened, as in most steps."""
        counts = {**self._counts, **self._loads.take_counts()}
        self._counts.clear()
        if self._saver is not None:
            counts.update(self._saver.take_counts())
        if not counts:
            return None
        stats = PoolStats()
        stats.count(**counts)
        return stats

    def finish_request(self, request_id: str) -> None:
        """The request is done, aborted or refused. Its history may be kept after this, but in the same step."""
        self._finished.append(request_id)

    def announce_weights(self, version: str) -> None:
        """The next reset of the cache is to new weights of this version."""
        self._namespaces.announce(version)

    def close(self) -> None:
        """Stop asking the pool; questions without an answer fail."""
        self._pool.close()

    def on_history_cached(self, request_id: str, key: UserKey, entry: UserEntry) -> None:
        request = self._requests.get(request_id)
        if self._saver is None or request is None or not request.namespace:
            return
        if request.save is not None:
            save, request.save = request.save, None
            self._saver.confirm(save, entry)
            return
        answer = self._trusted_answer(request)
        in_pool = answer is not None and request.is_all_in_pool(answer, time.time())
        result = answer.result if answer is not None else None
        self._saver.save(request.cached_history(entry), entry, result, in_pool=in_pool)

    def on_request_stopped(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            # No step will confirm the save, and the engine may need the blocks that it holds to go on.
            self._cancel_save(request)

    def on_cache_reset(self) -> None:
        self._namespaces.renew()
        if self._saver is not None:
            # vLLM resets its own prefix cache next, and does not while any block is held.
            self._saver.reset()
        for request in self._requests.values():
            # What runs goes on with the KV it has, and nothing of it is kept. What waits asks under the new name.
            name = "" if request.started else self._namespaces.of(request.cache_request.key, request.adapter_id)
            request.change_namespace(name)
            self._cancel_save(request)

    def _ask(self, request: PoolRequest, now: float) -> None:
        request.lookup.ask(self._pool, request.user, request.cache_request.history, self._block_size, now)

    def _count_lookup(self, answer: LookupAnswer, num_external_tokens: int) -> None:
        found = "miss" if answer.result.succeeded else "failed"
        if num_external_tokens:
            found = (answer.result.tier or Tier.DRAM).value
        self._counts[f"pool_lookups_{found}"] += 1

    def _start_load(
        self, request_id: str, request: PoolRequest, answer: LookupAnswer, block_ids: Sequence[int], counted: int
    ) -> None:
        record, tier = answer.result.usable, answer.result.tier or Tier.DRAM
        assert record is not None
        first, end = request.first_block, -(-request.hit_tokens // self._block_size)
        is_whole = first == 0 and end == -(-answer.common // self._block_size)
        reads = answer.reads if is_whole else plan_load(record, first, end - first)
        if counted:
            request.cache_request.tiers[tier.value] = counted
        request.lookup.start_load()
        self._loads.start(Load(request_id, request.user, record.generation, tier, counted), reads, block_ids[first:end])

    def _recheck_pool(self, request: PoolRequest) -> None:
        entry = self._users.table.get(request.cache_request.key)
        if self._saver is not None and entry is not None and request.in_hbm and request.writes_pool:
            self._saver.recheck(request.cached_history(entry), entry)

    def _saved_meanwhile(self, request: PoolRequest) -> int:
        """How many tokens of the user the pool may have by now, since a save has ended after it was asked."""
        if self._saver is None or request.lookup.num_questions >= MAX_QUESTIONS:
            return 0  # A request does not wait for ever for a user that is saved again and again.
        return self._saver.tokens_saved_since(request.cache_request.key, request.lookup.asked_at)

    def _trusted_answer(self, request: PoolRequest) -> LookupAnswer | None:
        """The pool's answer about the user, unless a load that failed or a save that ended has made it doubtful."""
        failed = request.lookup.state is LookupState.LOAD_FAILED
        if failed or self._saver is None:
            return None
        if self._saver.tokens_saved_since(request.cache_request.key, request.lookup.asked_at):
            return None
        return request.lookup.answer

    def _cancel_save(self, request: PoolRequest) -> None:
        if request.save is not None and self._saver is not None:
            self._saver.cancel(request.save)
            request.save = None

    def _reads_pool(self, request: PoolRequest) -> bool:
        return self._may_load and request.reads_pool
