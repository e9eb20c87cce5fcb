"""What the engine asks about users: how much of a history is in HBM, when to keep one, which requests wait.

:class:`UserCache` follows each request from its first look-up to its end and decides what enters the block table and
when. It knows nothing of vLLM: the engine reports what was computed, and hands over opaque blocks.

Life of a request::

    arrive  ->  find_hit ... find_hit  ->  start  ->  keep_history (each step)  ->  finish
                                            ^--- preempted: finish, then find_hit again ---'
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from userkv.cache.block_table import BlockPool, UserBlockTable
from userkv.cache.cache_request import NOT_FOUND, CacheRequest, FoundHit, RunningRequest
from userkv.cache.evictions import Evictions
from userkv.cache.hit import NO_HIT, UserHit, limit_hit
from userkv.cache.listener import NoListener, UserCacheListener
from userkv.cache.policies import make_policy
from userkv.cache.policies.policy import EvictionPolicy
from userkv.cache.prefix_share import PrefixShare
from userkv.cache.settings import CacheSettings
from userkv.cache.single_flight import SingleFlight
from userkv.cache.stats import UserCacheStats
from userkv.cache.waiting_users import WaitingUsers
from userkv.core.errors import IntegrityError
from userkv.core.request import UserKey


class UserCache:
    """Users' histories in HBM. Not thread-safe: the scheduler thread owns it.

    A running request whose history is to be kept leads the single flight of its user, until the history is in the
    table or the request ends.

    Args:
        block_size: tokens per KV block.
        num_blocks: KV blocks that requests and users share.
        pool: the engine's block pool.
        settings: limits.
        policy: order of eviction; by default the one that ``settings`` names.
        clock: seconds, monotonic.
        whole_users: evict whole users, instead of no more of a victim's tail than is needed.

    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        pool: BlockPool,
        settings: CacheSettings,
        policy: EvictionPolicy[UserKey] | None = None,
        clock: Callable[[], float] = time.monotonic,
        whole_users: bool = False,
    ) -> None:
        max_users = settings.max_users if settings.lru else 0
        if policy is None:
            policy = make_policy(settings.policy, num_blocks, max_users)
        self.table: UserBlockTable[UserKey] = UserBlockTable(block_size, pool, policy)
        self.share = PrefixShare(num_blocks, max_users)
        self.stats = UserCacheStats()
        self._listener: UserCacheListener = NoListener()
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._evictions = Evictions(self.table, self.stats, max_users, whole_users)
        self._flight: SingleFlight[UserKey] = SingleFlight(
            settings.single_flight_seconds, block_size, clock, self.stats
        )
        self._waiting: WaitingUsers[UserKey] = WaitingUsers(self.table)
        self._found: dict[str, FoundHit] = {}
        self._running: dict[str, RunningRequest] = {}

    def report_to(self, listener: UserCacheListener) -> None:
        """Report to ``listener`` from now on. The pool calls this once, when its workers are known."""
        self._listener = listener

    def arrive(self, request_id: str, request: CacheRequest) -> None:
        """A request waits to start: until then, what HBM has of its user is evicted last."""
        self._waiting.arrive(request_id, request.key)

    def find_hit(self, request_id: str, request: CacheRequest, num_tokens: int) -> UserHit:
        """How much of the request's history HBM holds; may be asked again until the request starts.

        Args:
            request_id: the engine's name of the request.
            request: its user and history.
            num_tokens: tokens that the request has (the prompt, and its output if it was preempted).

        """
        if not request.request.read:
            self._found[request_id] = NOT_FOUND
            return NO_HIT
        entry = self.table.get(request.key)
        held = request.held_tokens(entry)
        hit = limit_hit(held, num_tokens, self._block_size, self._num_blocks)
        self._found[request_id] = FoundHit(entry, held, hit)
        if entry is None or hit == 0:
            return NO_HIT
        return UserHit(entry.blocks[: self._blocks_for(hit)], hit)

    def last_hit(self, request_id: str) -> int:
        """How many tokens the last :meth:`find_hit` found for a request that has not started."""
        return self._found.get(request_id, NOT_FOUND).hit

    def must_wait(self, request_id: str, request: CacheRequest) -> bool:
        """Whether the request should wait because another one computes the same history right now."""
        if not request.request.read:
            return False
        return self._flight.must_wait(
            request_id, request.key, request.history, lambda: request.held_tokens(self.table.get(request.key))
        )

    def start(self, request_id: str, request: CacheRequest, hit_tokens: int, start_tokens: int) -> None:
        """The request got its blocks and runs from now on. Only the first call for a request counts.

        Args:
            request_id: the engine's name of the request.
            request: its user and history.
            hit_tokens: tokens that it takes from HBM.
            start_tokens: all tokens that it need not compute: these, and what a connector loads.

        """
        if request_id in self._running:
            return
        found = self._found.pop(request_id, NOT_FOUND)
        self._running[request_id] = RunningRequest(request, start_tokens)
        self.table.acquire(request.key)
        self._waiting.leave(request_id)
        if request.request.write and found.held < len(request.history):
            self._flight.start_leading(request_id, request.key, request.history)
        # A request that starts again was preempted, or its load failed: it computes what it has counted before.
        if not request.counted:
            request.counted = True
            self._count_start(request, hit_tokens, start_tokens)

    def requests_to_keep(self) -> list[str]:
        """The running requests whose history is to be kept and is not yet."""
        return self._flight.leaders()

    def keep_history(self, request_id: str, computed_tokens: int, blocks: Sequence[Any], ended: bool = False) -> None:
        """Keep the history of a running request as soon as all of it has been computed.

        Args:
            request_id: one of :meth:`requests_to_keep`.
            computed_tokens: tokens whose KV is in ``blocks`` for certain: the steps that wrote them are over.
            blocks: the request's blocks in order.
            ended: the request has ended and only its blocks are not free yet (a connector still reads them), so what
                there is of the history is all that will ever be.

        """
        running = self._running[request_id]
        is_whole = computed_tokens >= len(running.request.history) and computed_tokens > running.start_tokens
        if is_whole or ended:
            self._put(request_id, running, computed_tokens, blocks)
            self._flight.stop_leading(request_id)

    def finish(self, request_id: str, computed_tokens: int, blocks: Sequence[Any]) -> None:
        """The request ends, is aborted or preempted, and its blocks are about to be freed.

        What was computed of its history is kept. A request that never started is only forgotten.

        Args:
            request_id: the engine's name of the request.
            computed_tokens: as for :meth:`keep_history`.
            blocks: as for :meth:`keep_history`.

        """
        self._found.pop(request_id, None)
        self._waiting.leave(request_id)
        is_to_keep = self._flight.remove(request_id)
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if is_to_keep:
            self._put(request_id, running, computed_tokens, blocks)
        self._listener.on_request_stopped(request_id)
        self.table.release(running.request.key)
        self._evictions.evict_to_limit()

    def make_room(self, missing: int, request_id: str = "", request: CacheRequest | None = None) -> bool:
        """Release ``missing`` blocks for an allocation; none if all that users can lose would not be enough.

        Idle users go first, one after the other; the last one keeps the head of its history if its tail is enough.
        The user of the request that asks is spared, since the request wants to hit its blocks, and so are users with
        waiting requests. If that is not enough, these and running users lose the tails that no request of theirs
        uses. Without that, requests that hold blocks could wait for each other for ever.

        Args:
            missing: how many free blocks the allocation lacks, at least 1.
            request_id: the request that asks.
            request: its user and history; ``None`` for an ordinary request.

        Returns:
            Whether blocks were released, so that the allocation is worth another try.

        """
        if request is None:
            return self._evictions.make_room(missing, {}) > 0
        found = self._found.get(request_id, NOT_FOUND)
        is_current = found.entry is self.table.get(request.key)
        wanted = found.hit if is_current else 0
        self.table.acquire(request.key)
        freed = self._evictions.make_room(missing, {request.key: self._blocks_for(wanted)})
        self.table.release(request.key)
        entry = self.table.get(request.key)
        if is_current and entry is not found.entry:
            self._found[request_id] = FoundHit(entry, min(found.held, entry.num_tokens if entry else 0), wanted)
        return freed > 0

    def evict_ahead(self, missing: int, spared: CacheRequest | None = None) -> None:
        """Evict idle users, but not ``spared``'s, until ``missing`` blocks were released or no user is idle."""
        if missing <= 0:
            return
        if spared is not None:
            self.table.acquire(spared.key)
        self._evictions.evict_until(missing)
        if spared is not None:
            self.table.release(spared.key)

    def reset(self) -> None:
        """Forget all histories (new weights, say). Requests that run now will not be kept either."""
        for request_id in self._running:
            self._flight.stop_leading(request_id)
        self._found.clear()
        self.share.forget()
        self.table.clear()
        self._listener.on_cache_reset()

    def check_integrity(self) -> None:
        """Check every invariant; for tests.

        Raises:
            IntegrityError: an invariant does not hold.

        """
        self.table.check_integrity()
        busy = Counter(running.request.key for running in self._running.values())
        busy.update(self._waiting.spared())
        for key in busy.keys() | self.table.user_to_blocks.keys():
            if self.table.num_running(key) != busy[key]:
                raise IntegrityError(
                    f"{key!r}: {self.table.num_running(key)} requests counted, {busy[key]} run or wait"
                )
        if not self._running.keys() >= set(self._flight.leaders()):
            raise IntegrityError("a request is to be kept that does not run")

    def _put(self, request_id: str, running: RunningRequest, computed_tokens: int, blocks: Sequence[Any]) -> None:
        request = running.request
        num_tokens = min(computed_tokens, len(request.history))
        # Beyond what the request started with, nothing of it was computed: a load that failed or still runs included.
        if computed_tokens <= running.start_tokens or num_tokens == 0:
            return
        entry = self.table.get(request.key)
        if entry is not None:
            if request.held_tokens(entry) >= num_tokens:
                return
            # An unfinished history does not displace a longer one that may well be asked for again.
            if num_tokens < len(request.history) and num_tokens <= entry.num_tokens:
                return
        entry = self.table.put(request.key, request.history[:num_tokens], blocks[: self._blocks_for(num_tokens)])
        if num_tokens == len(request.history):
            self._listener.on_history_cached(request_id, request.key, entry)
        self._evictions.evict_to_limit()

    def _count_start(self, request: CacheRequest, hit_tokens: int, start_tokens: int) -> None:
        self.table.count_request(request.key, len(request.history))
        if not request.request.read:
            return
        if request.request.write:  # A history that is not kept cannot be lost to ordinary requests.
            entry = self.table.get(request.key)
            loaded_blocks = self._blocks_for(start_tokens) - self._blocks_for(hit_tokens)
            self.share.count_user_request(
                request.key,
                self._blocks_for(len(request.history)),
                0 if entry is None else entry.num_blocks,
                loaded_blocks,
            )
        request.tiers = {"hbm": hit_tokens} if hit_tokens else {}
        self.stats.history_tokens += len(request.history)
        self.stats.hit_tokens += hit_tokens
        self.stats.user_hits += hit_tokens > 0
        self.stats.user_misses += hit_tokens == 0 < len(request.history)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
