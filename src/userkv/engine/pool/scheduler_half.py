"""The connector in the scheduler: what to load, what to save, and when.

It decides nothing about bytes: it asks the pool (through :class:`AgreedPool`, which never blocks), keeps its answers by
request, and turns them into jobs for the workers. Scheduler thread only, but for the callbacks that say so.
"""

import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from userkv.core.block_table import UserEntry, longest_hit
from userkv.core.keys import pool_uid
from userkv.core.load_plan import plan_load
from userkv.core.request import UserKey
from userkv.core.tokens import common_prefix
from userkv.core.user_cache import UserCache, UserLookup
from userkv.engine.pool.agreement import AgreedPool, PoolAnswer
from userkv.engine.pool.messages import LoadJob, StepJobs
from userkv.engine.pool.saves import History, PoolSaves, Save
from userkv.engine.pool.stats import PoolStats
from userkv.store.backend import Tier

ANSWER_SECONDS = 5.0
"""How long an answer about a waiting request is trusted; Mooncake's leases, which keep its extents there, last 10 s."""

RECHECK_SECONDS = 60.0
"""How often the pool is asked whether it still has a user whose requests all hit HBM."""

RETRY_SECONDS = 5.0
"""How soon a save that failed may be tried again."""

BAD_SECONDS = 30.0
"""How long a record is left alone from which a load failed, unless it is replaced before."""

_MAX_BAD = 10_000


@dataclass(slots=True, eq=False)
class _Asking:
    """A request as the pool sees it, from its arrival to its end.

    Attributes:
        namespace: "" if its KV cannot be named safely, so that the pool is left alone.
        asked_at: when the pool was asked last; 0 = never.
        answer: what it said, ``None`` before.
        common: how many of the history's tokens the pool holds, by that answer.
        first_block: the first block to load.
        hit_tokens: history tokens that HBM and pool have together.
        load: what loading has come to, if anything is or was loaded.
        save: a save during the forward pass that is not confirmed yet.
        in_hbm: HBM had the whole history when the request arrived.
        started: it has got blocks.

    """

    lookup: UserLookup
    adapter_id: int
    uid: str
    namespace: str
    asked_at: float = 0.0
    answer: PoolAnswer | None = None
    common: int = 0
    first_block: int = 0
    hit_tokens: int = 0
    load: "_Load | None" = None
    save: Save | None = None
    in_hbm: bool = False
    started: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    """A load, until all ranks have reported it and after."""

    request_id: str
    user: tuple[str, str]
    generation: int
    tokens: int
    ranks_left: int
    ok: bool = True


@dataclass(slots=True, eq=False)
class _Checked:
    """When a user's entry in HBM was last held against the pool."""

    entry: UserEntry
    next_check: float
    saved_at: float = 0.0


class SchedulerHalf:
    """What the connector does in the scheduler's process. Implements :class:`UserCacheListener`.

    Args:
        pool: asks all ranks.
        users: the users in HBM.
        saves: saves under way; ``None`` if this engine saves nothing.
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
        pool: AgreedPool,
        users: UserCache,
        saves: PoolSaves | None,
        block_size: int,
        namespace_of: Callable[[UserKey, int], str],
        new_weights: Callable[[], None],
        *,
        loads: bool = True,
        load_async: bool = True,
        save_during_forward: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._users = users
        self._saves = saves
        self._block_size = block_size
        self._namespace_of = namespace_of
        self._new_weights = new_weights
        self._loads = loads
        self._load_async = load_async
        self._save_during_forward = save_during_forward
        self._clock = clock
        self._requests: dict[str, _Asking] = {}
        self._job_ids = itertools.count(1)
        self._new_loads: list[LoadJob] = []
        self._loading: dict[int, _Load] = {}
        self._bad: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        self._checked: OrderedDict[UserKey, _Checked] = OrderedDict()
        self._kept_meanwhile: dict[UserKey, History] = {}
        self._ended_saves: deque[tuple[UserKey, bool]] = deque()
        self._over: list[str] = []

    def new_request(self, request_id: str, lookup: UserLookup, num_tokens: int, adapter_id: int = 0) -> None:
        """A request has arrived: ask the pool early, unless HBM has all that it could hit."""
        asking = _Asking(lookup, adapter_id, pool_uid(lookup.key), self._namespace_of(lookup.key, adapter_id))
        self._requests[request_id] = asking
        in_hbm = longest_hit(self._users.table.get(lookup.key), lookup.history)
        asking.in_hbm = in_hbm == len(lookup.history)
        if self._may_load(asking) and in_hbm < _wanted(lookup, num_tokens):
            self._ask(asking)

    def find(self, request_id: str, num_tokens: int, aligned_local: int) -> int | None:
        """How many tokens to load behind the first ``aligned_local``, which HBM has.

        Returns:
            0 if the pool has no more than HBM; ``None`` while the pool has not answered.

        """
        asking = self._requests.get(request_id)
        # Whoever has loaded once, well or not, computes the rest: nothing is tried again and again.
        if asking is None or not self._may_load(asking) or asking.load is not None:
            return 0
        wanted = _wanted(asking.lookup, num_tokens)
        local = max(aligned_local, self._users.found_tokens(request_id))
        if local >= wanted:
            return 0
        if asking.asked_at == 0.0 or self._is_stale(asking):
            self._ask(asking)
        answer = asking.answer
        if answer is None:
            return None
        hit = min(asking.common, wanted)
        record = answer.usable
        if record is None or hit <= local or self._is_bad(asking, record.generation):
            return 0
        asking.first_block, asking.hit_tokens = aligned_local // self._block_size, hit
        return hit - aligned_local

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request has its blocks, and will have ``num_external_tokens`` from the pool."""
        asking = self._requests.get(request_id)
        if asking is None or asking.load is not None:
            return
        answer = asking.answer
        if not asking.started and answer is not None:
            found = (answer.tier or Tier.DRAM).value if num_external_tokens else "miss" if answer.known else "failed"
            self.counts[f"pool_lookups_{found}"] += 1
        asking.started = True
        if num_external_tokens == 0:
            self._check_pool(asking)
            return
        assert answer is not None
        assert answer.usable is not None
        first, end = asking.first_block, -(-asking.hit_tokens // self._block_size)
        job = LoadJob(
            next(self._job_ids),
            request_id,
            asking.uid,
            asking.namespace,
            plan_load(answer.usable, first, end - first),
            tuple(block_ids[first:end]),
        )
        user = (asking.uid, asking.namespace)
        asking.load = _Load(request_id, user, answer.usable.generation, num_external_tokens, self._pool.num_ranks)
        self._loading[job.job_id] = asking.load
        self._new_loads.append(job)
        self.counts["swapin_attempts"] += 1

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
        lookup, answer = asking.lookup, asking.answer
        if not start < len(lookup.history) <= end:
            return
        if lookup.request.write and asking.namespace and answer is not None and answer.known:
            held = tuple(blocks[: -(-len(lookup.history) // self._block_size)])
            history = History(lookup.key, asking.uid, asking.namespace, lookup.history, held)
            asking.save = self._saves.start(history, answer, during_forward=True)

    def take_jobs(self) -> StepJobs:
        """What the workers shall do with the step that is being scheduled."""
        loads, self._new_loads = self._new_loads, []
        if self._saves is None:
            return StepJobs(loads)
        self._note_ended_saves(self._saves)
        jobs = StepJobs(loads, self._saves.ship())
        self._saves.release()
        for request_id in self._over:
            over = self._requests.pop(request_id, None)
            if over is not None and over.save is not None:
                self._saves.cancel(over.save)  # Nobody can tell any more whether the step computed what it should.
        self._over.clear()
        return jobs

    def needs_step(self) -> bool:
        """Whether saves wait for a step to go on with, even if no request does."""
        return self._saves is not None and (bool(self._kept_meanwhile) or self._saves.has_unshipped())

    def loaded(self, reports: Mapping[int, tuple[int, bool]]) -> None:
        """Workers have ended loads: for each job, how many ranks, and whether all of them succeeded."""
        for job_id, (ranks, ok) in reports.items():
            load = self._loading[job_id]
            load.ranks_left -= ranks
            load.ok &= ok
            if not ok:
                self._load_failed(load)
            if load.ranks_left == 0:
                del self._loading[job_id]
                self.counts["swapin_successes"] += load.ok
                self.counts["swapin_tokens"] += load.tokens if load.ok else 0

    def take_stats(self) -> PoolStats:
        """Figures since the last call."""
        stats = PoolStats()
        stats.count(**self.counts)
        self.counts.clear()
        if self._saves is not None:
            stats.count(**self._saves.counts)
            self._saves.counts.clear()
        return stats

    def finished(self, request_id: str) -> None:
        """The request is over: done, aborted or refused. Its history may be kept after this, but in the same step."""
        self._over.append(request_id)

    def history_kept(self, request_id: str, key: UserKey, entry: UserEntry) -> None:
        asking = self._requests.get(request_id)
        if self._saves is None or asking is None or not asking.namespace:
            return
        if asking.save is not None:
            save, asking.save = asking.save, None
            self._checked[key] = _Checked(entry, self._clock() + RETRY_SECONDS)
            self._saves.confirm(save)
            return
        checked = self._checked.get(key)
        outdated = checked is not None and checked.saved_at >= asking.asked_at
        outdated |= asking.load is not None and not asking.load.ok
        history = History(key, asking.uid, asking.namespace, entry.tokens, entry.blocks)
        self._save(history, entry, None if outdated else asking.answer)

    def histories_forgotten(self) -> None:
        self._new_weights()
        self._checked.clear()
        self._kept_meanwhile.clear()
        for asking in self._requests.values():
            # What runs goes on with the KV it has, and nothing of it is kept. What waits asks under the new name.
            asking.answer, asking.asked_at = None, 0.0
            asking.namespace = "" if asking.started else self._namespace_of(asking.lookup.key, asking.adapter_id)
            if asking.save is not None and self._saves is not None:
                self._saves.cancel(asking.save)
                asking.save = None

    def save_ended(self, save: Save, ok: bool) -> None:
        """A save has ended. Any thread."""
        self._ended_saves.append((save.history.key, ok))

    def _note_ended_saves(self, saves: PoolSaves) -> None:
        while self._ended_saves:
            key, ok = self._ended_saves.popleft()
            checked = self._checked.get(key)
            if checked is not None:
                checked.saved_at = self._clock()
                checked.next_check = checked.saved_at + (RECHECK_SECONDS if ok else RETRY_SECONDS)
            history = self._kept_meanwhile.pop(key, None)
            entry = self._users.table.get(key)
            if history is not None and entry is not None and entry.blocks == history.blocks:
                self._save(history, entry, None)

    def _save(self, history: History, entry: UserEntry, answer: PoolAnswer | None) -> None:
        assert self._saves is not None
        key = history.key
        saved_at = self._checked[key].saved_at if key in self._checked else 0.0
        self._checked[key] = _Checked(entry, self._clock() + RETRY_SECONDS, saved_at)
        self._checked.move_to_end(key)
        while len(self._checked) > 2 * len(self._users.table) + 1000:
            self._checked.popitem(last=False)
        if self._saves.is_saving(history.uid, history.namespace):
            self._kept_meanwhile[key] = history
        else:
            self._saves.start(history, answer)

    def _check_pool(self, asking: _Asking) -> None:
        """See to it that users who only ever hit HBM are in the pool: a save may have failed, or the pool forgotten."""
        key = asking.lookup.key
        entry = self._users.table.get(key)
        if (
            self._saves is None
            or entry is None
            or not (asking.in_hbm and asking.namespace and asking.lookup.request.write)
        ):
            return
        checked = self._checked.get(key)
        if checked is None or checked.entry is not entry or self._clock() >= checked.next_check:
            self._save(History(key, asking.uid, asking.namespace, entry.tokens, entry.blocks), entry, None)

    def _is_bad(self, asking: _Asking, generation: int) -> bool:
        bad, until = self._bad.get((asking.uid, asking.namespace), (0, 0.0))
        return bad == generation and self._clock() < until

    def _may_load(self, asking: _Asking) -> bool:
        return self._loads and asking.lookup.request.read and bool(asking.namespace)

    def _is_stale(self, asking: _Asking) -> bool:
        return asking.answer is not None and self._clock() - asking.asked_at > ANSWER_SECONDS

    def _ask(self, asking: _Asking) -> None:
        asked_at = asking.asked_at = self._clock()
        asking.answer = None

        def answered(answer: PoolAnswer) -> None:  # On the RPC client's thread.
            usable = answer.usable
            common = 0 if usable is None else common_prefix(usable.tokens, asking.lookup.history)
            if asking.asked_at == asked_at:
                asking.common = common
                asking.answer = answer  # Last: it is what the scheduler's thread looks at.

        self._pool.lookup(asking.uid, asking.namespace, answered)

    def _load_failed(self, load: _Load) -> None:
        self._bad[load.user] = (load.generation, self._clock() + BAD_SECONDS)
        if len(self._bad) > _MAX_BAD:
            self._bad.popitem(last=False)
        asking = self._requests.get(load.request_id)
        if asking is not None and asking.save is not None and self._saves is not None:
            self._saves.cancel(asking.save)
            asking.save = None


def _wanted(lookup: UserLookup, num_tokens: int) -> int:
    """How many history tokens a request can take from anywhere: the engine must compute one token."""
    return min(len(lookup.history), num_tokens - 1)
