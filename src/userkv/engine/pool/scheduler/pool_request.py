"""A request as the pool sees it: what it wants, and what the pool has answered."""

from dataclasses import dataclass

from userkv.cache.block_table import UserEntry
from userkv.cache.user_cache import CacheRequest
from userkv.core.tokens import common_prefix
from userkv.engine.pool.scheduler.loads import Load
from userkv.engine.pool.scheduler.pool_client import PoolClient, PoolLookupResult
from userkv.engine.pool.scheduler.saves import History, Save
from userkv.records.load_plan import ExtentRead, plan_load

ANSWER_SECONDS = 5.0
"""How long an answer about a waiting request is trusted; Mooncake's leases, which keep its extents there, last 10 s."""

MOST_QUESTIONS = 4
"""How often a request asks because its user was saved meanwhile, at most."""


@dataclass(slots=True, eq=False)
class PoolRequest:
    """A request, from its arrival to its end. Scheduler thread only, but for the answer, which comes on another one.

    Attributes:
        namespace: "" if its KV cannot be named safely, so that the pool is left alone.
        asked_at: when the pool was asked last; 0 = never.
        times_asked: how often it was asked.
        answer: what it said, ``None`` before.
        common: how many of the history's tokens the pool holds, by that answer.
        reads: how to load all of that, planned beside the scheduler; HBM may turn out to have a head of it.
        first_block: the first block to load.
        hit_tokens: history tokens that HBM and pool have together.
        load: what loading has come to, if anything is or was loaded.
        save: a save during the forward pass that is not confirmed yet.
        in_hbm: HBM had the whole history when the request arrived.
        started: it has got blocks.

    """

    lookup: CacheRequest
    adapter_id: int
    uid: str
    namespace: str
    asked_at: float = 0.0
    times_asked: int = 0
    answer: PoolLookupResult | None = None
    common: int = 0
    reads: tuple[ExtentRead, ...] = ()
    first_block: int = 0
    hit_tokens: int = 0
    load: Load | None = None
    save: Save | None = None
    in_hbm: bool = False
    started: bool = False

    @property
    def user(self) -> tuple[str, str]:
        """Whose KV this is, by its name in the pool."""
        return self.uid, self.namespace

    def wanted(self, num_tokens: int) -> int:
        """How many history tokens the request can take from anywhere: the engine must compute one token."""
        return min(len(self.lookup.history), num_tokens - 1)

    def history(self, entry: UserEntry) -> History:
        """What to save of the user, as HBM has it."""
        return History(self.lookup.key, self.uid, self.namespace, entry.tokens, entry.blocks)

    def ask(self, pool: PoolClient, block_size: int, now: float) -> None:
        """Ask the pool; until it answers, there is no :attr:`answer`."""
        self.asked_at = now
        self.times_asked += 1
        self.answer = None

        def answered(answer: PoolLookupResult) -> None:  # On the RPC client's thread.
            usable = answer.usable
            common = 0 if usable is None else common_prefix(usable.tokens, self.lookup.history)
            reads = () if usable is None else plan_load(usable, 0, -(-common // block_size))
            if self.asked_at == now:
                self.common, self.reads = common, reads
                self.answer = answer  # Last: it is what the scheduler's thread looks at.

        pool.lookup(self.uid, self.namespace, answered, is_new_request=self.times_asked == 1)

    def holds_all(self, answer: PoolLookupResult, now: float) -> bool:
        """Whether the pool has the whole history, by this answer of its; ``now`` in unix seconds."""
        return answer.usable is not None and self.common == len(self.lookup.history) and not answer.usable.expired(now)

    def must_ask(self, now: float) -> bool:
        """Whether there is neither a question nor an answer that can be trusted still."""
        # Again once only, or a request would ask for ever where steps take longer than that.
        stale = self.answer is not None and now - self.asked_at > ANSWER_SECONDS and self.times_asked == 1
        return self.asked_at == 0.0 or stale

    def rename(self, namespace: str) -> None:
        """What the pool has said does not matter any more; from now on the KV is called like this."""
        self.answer, self.asked_at, self.times_asked = None, 0.0, 0
        self.namespace = namespace
