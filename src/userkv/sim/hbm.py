"""A trace through the user cache in HBM."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from userkv.cache.cache_request import CacheRequest
from userkv.cache.policies.policy import EvictionPolicy
from userkv.cache.settings import CacheSettings
from userkv.cache.user_cache import UserCache
from userkv.core.request import UserKey, UserRequest
from userkv.sim.blocks import SimBlock, SimBlockPool
from userkv.sim.trace import SimRequest, SimResult


class _Arrived(NamedTuple):
    """A request that waits."""

    name: str
    request: CacheRequest
    num_tokens: int


class HbmSimulation:
    """The engine's :class:`UserCache` under requests that are computed at once and end some requests later.

    A request waits until its blocks are there; the oldest running request ends if there are no others.

    Args:
        block_size: tokens per block.
        num_blocks: blocks for users and running requests.
        policy: order of eviction.
        concurrency: requests that hold blocks at a time.
        whole_users: evict whole users.
        waiting: requests that the scheduler knows before their turn, for :meth:`run`.

    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        policy: EvictionPolicy[UserKey],
        concurrency: int = 1,
        whole_users: bool = False,
        waiting: int = 0,
    ) -> None:
        self._block_size = block_size
        self._pool = SimBlockPool(num_blocks)
        self.cache = UserCache(
            block_size, num_blocks, self._pool, CacheSettings(max_users=0), policy, whole_users=whole_users
        )
        self._concurrency = concurrency
        self._waiting = waiting
        self._running: deque[tuple[str, int, list[SimBlock]]] = deque()
        self._count = 0

    def run(self, requests: Iterable[SimRequest]) -> SimResult:
        """Take all requests, one after the other."""
        prompt = hits = 0
        queue: deque[_Arrived] = deque()
        for request in requests:
            prompt += len(request.history) + request.new_tokens
            queue.append(self._arrive(request))
            if len(queue) > self._waiting:
                hits += self._start(queue.popleft())
        hits += sum(self._start(arrived) for arrived in queue)
        while self._running:
            self._end_oldest()
        return SimResult(prompt, hits)

    def request(self, request: SimRequest) -> int:
        """Start a request, and end the oldest one if too many run: how many of its tokens were in HBM."""
        return self._start(self._arrive(request))

    def _arrive(self, request: SimRequest) -> "_Arrived":
        self._count += 1
        contract = UserRequest(request.user, len(request.history))
        arrived = _Arrived(
            str(self._count),
            CacheRequest(UserKey(request.user), contract, request.history),
            len(request.history) + request.new_tokens,
        )
        self.cache.arrive(arrived.name, arrived.request)
        return arrived

    def _start(self, arrived: "_Arrived") -> int:
        while len(self._running) >= self._concurrency:
            self._end_oldest()
        name, request, num_tokens = arrived
        while True:
            hit = self.cache.find_hit(name, request, num_tokens)
            shared = list(hit.blocks[: hit.num_tokens // self._block_size])
            missing = -(-num_tokens // self._block_size) - len(shared) - self._pool.num_free
            if missing <= 0:
                break
            if not self.cache.make_room(missing, name, request):
                if not self._running:
                    self.cache.finish(name, 0, ())
                    return 0  # It is larger than the cache: no engine would take it.
                self._end_oldest()
        self._pool.touch(shared)
        blocks = shared + self._pool.allocate(-(-num_tokens // self._block_size) - len(shared))
        self.cache.start(name, request, hit.num_tokens, hit.num_tokens)
        if name in self.cache.requests_to_keep():
            self.cache.keep_history(name, num_tokens, blocks)
        self._running.append((name, num_tokens, blocks))
        return hit.num_tokens

    def _end_oldest(self) -> None:
        name, num_tokens, blocks = self._running.popleft()
        self.cache.finish(name, num_tokens, blocks)
        self._pool.free_blocks(blocks)
