"""A request as the pool's scheduler sees it, from its arrival to its end."""

from dataclasses import dataclass, field

from userkv.cache.block_table import UserEntry
from userkv.cache.cache_request import CacheRequest
from userkv.engine.pool.scheduler.lookup import LookupAnswer, PoolLookup
from userkv.engine.pool.scheduler.save import History, Save


@dataclass(slots=True, eq=False)
class PoolRequest:
    """A request that belongs to a user. Scheduler thread only.

    Attributes:
        cache_request: the request, as the cache in HBM sees it.
        adapter_id: vLLM's number of its adapter; 0 without one.
        uid: the user's name in the pool.
        namespace: of the user's KV; "" if it cannot be named safely, so that the pool is left alone.
        in_hbm: HBM had the whole history when the request arrived.
        started: the request has got blocks at least once.
        lookup: what the pool was asked and has answered.
        first_block: the first block that the pool has to load.
        hit_tokens: history tokens that HBM and pool have together.
        save: a save during the forward pass that is not confirmed yet.

    """

    cache_request: CacheRequest
    adapter_id: int
    uid: str
    namespace: str
    in_hbm: bool
    started: bool = False
    lookup: PoolLookup = field(default_factory=PoolLookup)
    first_block: int = 0
    hit_tokens: int = 0
    save: Save | None = None

    @property
    def user(self) -> tuple[str, str]:
        """The user's name in the pool, and the namespace of its KV."""
        return self.uid, self.namespace

    @property
    def reads_pool(self) -> bool:
        """Whether the client lets the request use KV from the pool, and the KV has a name there."""
        return self.cache_request.request.read and bool(self.namespace)

    @property
    def writes_pool(self) -> bool:
        """Whether the client lets the request's history be kept, and the KV has a name in the pool."""
        return self.cache_request.request.write and bool(self.namespace)

    def wanted(self, num_tokens: int) -> int:
        """How many history tokens the request can take from anywhere: the engine must compute one token."""
        return min(len(self.cache_request.history), num_tokens - 1)

    def cached_history(self, entry: UserEntry) -> History:
        """What to save of the user, as HBM has it."""
        return History(self.cache_request.key, *self.user, entry.tokens, entry.blocks)

    def is_all_in_pool(self, answer: LookupAnswer, now: float) -> bool:
        """Whether the pool has the whole history, by this answer; ``now`` in unix seconds."""
        usable = answer.result.usable
        return usable is not None and answer.common == len(self.cache_request.history) and not usable.expired(now)

    def change_namespace(self, namespace: str) -> None:
        """From now on the user's KV is of other weights: what the pool has said is void."""
        self.lookup.void()
        self.namespace = namespace
