"""The connector's scheduler on the real user cache, with vLLM's calls in vLLM's order, and no vLLM."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_pool_client import COMMITTED, AskedLookup, FakePoolClient, NumberedBlockPool
from tests.support.records import BLOCK, answer_of, record_of
from userkv.cache.cache_request import CacheRequest
from userkv.cache.settings import CacheSettings
from userkv.cache.user_cache import UserCache
from userkv.core.request import UserKey, UserRequest
from userkv.core.tokens import as_tokens
from userkv.engine.pool.scheduler.connector_scheduler import ConnectorScheduler
from userkv.engine.pool.scheduler.history_saver import HistorySaver
from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, PoolLookupResult
from userkv.engine.pool.scheduler.saves import PoolSaves, SaveSettings
from userkv.engine.pool.wire.messages import SaveJob, StepJobs

CANDIDATES = 2
"""Tokens of a request behind its history."""

HISTORY = list(range(22))
"""Five blocks and a half."""

FULL = answer_of(record_of(HISTORY, generation=5))
"""The pool has all of it."""


class Clock:
    """Moves when a test moves it, and a little when a request arrives."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Running:
    """A request, as the engine knows it."""

    lookup: CacheRequest
    num_tokens: int
    local: int = 0
    external: int = 0
    hit: Any = None
    blocks: list[Any] = field(default_factory=list)


class NumberedNamespaces:
    """One namespace for all users: ``n1``, and after new weights ``n2``. "" stays "", and keeps the pool out."""

    current = "n1"

    def of(self, key: UserKey, adapter_id: int) -> str:
        return self.current

    def renew(self) -> None:
        self.current = self.current and f"n{int(self.current[1:]) + 1}"


class SchedulerBench:
    """One engine's scheduler. ``jobs``: what the last step shipped."""

    def __init__(self, ranks: int = 1, saves: bool = True, num_blocks: int = 100, **options: Any) -> None:
        self.clock = Clock()
        self.blocks = NumberedBlockPool(num_blocks)
        self.pool = FakePoolClient(ranks)
        self.users = UserCache(BLOCK, num_blocks, self.blocks, CacheSettings(), clock=self.clock)
        self.namespaces = NumberedNamespaces()
        limits = SaveSettings(BLOCK, 2, max_saves=8, max_held_blocks=1000, ttl_seconds=0, writer="w")
        self.saves = PoolSaves(self.pool, self.blocks, limits) if saves else None  # type: ignore[arg-type]
        self.scheduler = ConnectorScheduler(
            self.pool,  # type: ignore[arg-type]
            self.users,
            self.namespaces,  # type: ignore[arg-type]
            HistorySaver(self.saves, self.users.table, self.clock) if self.saves is not None else None,
            clock=self.clock,
            **options,
        )
        self.users.report_to(self.scheduler)
        self.requests: dict[str, Running] = {}
        self.jobs = StepJobs()

    def arrive(self, name: str, history: list[int], user: str = "u", **switches: bool) -> None:
        """A request comes in."""
        self.clock.now += 1e-3
        lookup = CacheRequest(UserKey(user), UserRequest(user, len(history), **switches), as_tokens(history))
        self.requests[name] = Running(lookup, len(history) + CANDIDATES)
        self.scheduler.add_request(name, lookup, len(history) + CANDIDATES)

    def find(self, name: str) -> int | None:
        """What the pool would load behind what HBM has."""
        request = self.requests[name]
        request.hit = self.users.find_hit(name, request.lookup, request.num_tokens)
        request.local = request.hit.num_tokens
        return self.scheduler.find_loadable(name, request.num_tokens, request.local // BLOCK * BLOCK)

    def start(self, name: str, external: int) -> None:
        """It gets its blocks; its step is shipped."""
        request = self.requests[name]
        shared = list(request.hit.blocks[: request.local // BLOCK])
        self.blocks.touch(shared)
        request.blocks = shared + self.blocks.take(-(-request.num_tokens // BLOCK) - len(shared))
        request.external = external
        ready = len(shared) * BLOCK + external if external else request.local
        self.users.start(name, request.lookup, request.local, ready)
        self.scheduler.start_request(name, [block.block_id for block in request.blocks], external)
        self.step()

    def step(self) -> StepJobs:
        """The engine takes the jobs of a step."""
        self.jobs = self.scheduler.take_jobs()
        return self.jobs

    def finish(self, name: str, computed: int | None = None) -> None:
        """It ends; its history is kept if all of it was computed."""
        request = self.requests.pop(name)
        self.scheduler.finish_request(name)
        self.users.finish(name, request.num_tokens if computed is None else computed, request.blocks)
        self.blocks.free_blocks(reversed(request.blocks))

    def run(self, name: str, history: list[int], user: str = "u", answer: PoolLookupResult | None = None) -> int:
        """From arrival to end, with one more step behind it. Returns how many tokens were taken from the pool."""
        self.arrive(name, history, user)
        external = self.find(name)
        if external is None:
            assert answer is not None, "the pool is asked, and the test has no answer"
            self.asked().answer(answer)
            external = self.find(name)
        assert external is not None
        self.start(name, external)
        if external:
            self.scheduler.report_loads({job.job_id: (self.pool.num_ranks, True) for job in self.jobs.loads})
        self.finish(name)
        self.step()
        return external

    def asked(self) -> AskedLookup:
        """The only open look-up."""
        (lookup,) = self.pool.lookups
        self.pool.lookups.clear()
        return lookup

    def write(self, *jobs: SaveJob, ok: bool = True) -> None:
        """All ranks do saves."""
        assert self.saves is not None
        for job in jobs or self.jobs.saves:
            for _ in range(self.pool.num_ranks):
                self.saves.report_write(job.job_id, ok)

    def save(self, ok: bool = True) -> None:
        """What the last step shipped is written and committed, or not."""
        self.write(ok=ok)
        for commit in self.pool.commits:
            commit.answer(COMMITTED)
        self.pool.commits.clear()
        self.step()

    def evict(self, *keep: str) -> None:
        """Users leave HBM."""
        for key in list(self.users.table.user_to_blocks):
            if key.user_id not in keep:
                self.users.table.drop(key)

    def assert_nothing_is_held(self) -> None:
        """When all is over, every block is free."""
        self.step()
        self.evict()
        assert self.saves is None or (len(self.saves) == 0 and not self.scheduler.needs_step())
        assert self.blocks.num_free == len(self.blocks.blocks)


def drain(bench: SchedulerBench) -> None:
    """Let all saves end."""
    for _ in range(3):
        bench.save(ok=False)
        for lookup in bench.pool.lookups:
            lookup.answer(LOOKUP_FAILED)
        bench.pool.lookups.clear()
        bench.step()
