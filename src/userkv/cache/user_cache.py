"""What the engine asks about users: how much of a history is in HBM, when to keep one, whom to wait for.

:class:`UserCache` follows each request from its first look-up to its end and decides what enters the block table and
when. It knows nothing of vLLM: the engine tells it what was computed, and hands it opaque blocks.

Life of a request::

    arrive  ->  find ... find  ->  start  ->  publish (each step)  ->  finish
                                    ^--- preempted: finish, then find again ---'
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from userkv.cache.block_table import BlockPool, UserBlockTable, UserEntry, longest_hit
from userkv.cache.policies import make_policy
from userkv.cache.policies.policy import EvictionPolicy
from userkv.cache.prefix_share import PrefixShare
from userkv.cache.settings import CacheSettings
from userkv.cache.single_flight import SingleFlight
from userkv.cache.stats import UserCacheStats
from userkv.cache.waiting_users import WaitingUsers
from userkv.core.errors import IntegrityError
from userkv.core.request import UserKey, UserRequest
from userkv.core.tokens import TokenArray


class UserHit(NamedTuple):
    """History found in HBM: the first ``num_tokens`` tokens, in ``blocks`` (the last one may be partly valid)."""

    blocks: Sequence[Any]
    num_tokens: int


NO_HIT = UserHit((), 0)


class UserCacheListener(Protocol):
    """Somebody who wants to know what happens to histories: the pool. Called on the scheduler's thread."""

    def on_history_cached(self, request_id: str, key: UserKey, entry: UserEntry) -> None:
        """A request has computed its whole history, which is in the table now."""

    def on_request_stopped(self, request_id: str) -> None:
        """A request ends, is aborted or preempted; if its history was to be kept, it has been."""

    def on_cache_reset(self) -> None:
        """All users were forgotten, because their KV is not valid any more."""


@dataclass(slots=True, eq=False)
class CacheRequest:
    """A user request as the cache sees it; made once, when the engine receives the request.

    Attributes:
        key: whose KV this is.
        request: the validated contract.
        history: the first ``history_len`` prompt tokens.
        counted: the request is in the statistics already, and the policy of eviction knows of it.
        tiers: history tokens that it did not have to compute when it started first, by where they came from (``hbm``,
            ``dram``, ``ssd``).

    """

    key: UserKey
    request: UserRequest
    history: TokenArray
    counted: bool = False
    tiers: dict[str, int] = field(default_factory=dict)
    _compared: tuple[UserEntry | None, int] = (None, 0)

    def held_by(self, entry: UserEntry | None) -> int:
        """How many tokens of the history an entry of the table holds; compared with each entry once."""
        if entry is not self._compared[0]:
            self._compared = entry, longest_hit(entry, self.history)
        return self._compared[1]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The answer of the last look-up, remembered until the request starts."""

    entry: UserEntry | None = None
    common: int = 0
    hit: int = 0


@dataclass(slots=True, eq=False)
class _Running:
    """A request that holds blocks."""

    lookup: CacheRequest
    found: _Found
    start_tokens: int
    published: bool
    """Nothing of its history is to be kept any more: it is in the table, or must not enter it."""


_NOTHING = _Found()


class UserCache:
    """Users' histories in HBM. Not thread-safe: the scheduler thread owns it.

    Args:
        block_size: tokens per KV block.
        num_blocks: KV blocks that requests and users share.
        pool: the engine's block pool.
        settings: limits.
        policy: order of eviction; by default the one that ``settings`` names.
        clock: seconds, monotonic.

    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        pool: BlockPool,
        settings: CacheSettings,
        policy: EvictionPolicy[UserKey] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_users = settings.max_users if settings.lru else 0
        self.table: UserBlockTable[UserKey] = UserBlockTable(
            block_size,
            pool,
            policy if policy is not None else make_policy(settings.policy, num_blocks, self._max_users),
        )
        self.share = PrefixShare(num_blocks, self._max_users)
        self.stats = UserCacheStats()
        self.listener: UserCacheListener | None = None
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._flight: SingleFlight[UserKey] = SingleFlight(
            settings.single_flight_seconds, block_size, clock, self.stats
        )
        self._waiting: WaitingUsers[UserKey] = WaitingUsers(self.table)
        self._found: dict[str, _Found] = {}
        self._running: dict[str, _Running] = {}

    def arrive(self, request_id: str, lookup: CacheRequest) -> None:
        """A request waits to start: what HBM has of its user had better stay until then."""
        self._waiting.arrive(request_id, lookup.key)

    def find(self, request_id: str, lookup: CacheRequest, num_tokens: int) -> UserHit:
        """How much of the request's history HBM holds; may be asked again until the request starts.

        At most ``num_tokens - 1`` tokens hit, since the engine must compute one to have logits. A hit that ends inside
        a block needs one more block (the private copy of it); a request that would fill the whole cache cannot have
        that one, so its hit ends at a block's end.

        Args:
            request_id: the engine's name of the request.
            lookup: what the request says of its user.
            num_tokens: tokens that the request has (the prompt, and its output if it was preempted).

        """
        if not lookup.request.read:
            self._found[request_id] = _NOTHING
            return NO_HIT
        entry = self.table.get(lookup.key)
        common = lookup.held_by(entry)
        hit = min(common, num_tokens - 1)
        if self._blocks_for(num_tokens) >= self._num_blocks:
            hit -= hit % self._block_size
        self._found[request_id] = _Found(entry, common, hit)
        if entry is None or hit == 0:
            return NO_HIT
        return UserHit(entry.blocks[: self._blocks_for(hit)], hit)

    def found_tokens(self, request_id: str) -> int:
        """What the last :meth:`find` for a request that has not started answered."""
        return self._found.get(request_id, _NOTHING).hit

    def must_wait(self, request_id: str, lookup: CacheRequest) -> bool:
        """Whether the request should wait because another one computes the same history right now."""
        if not lookup.request.read:
            return False
        return self._flight.must_wait(
            request_id, lookup.key, lookup.history, lambda: lookup.held_by(self.table.get(lookup.key))
        )

    def start(self, request_id: str, lookup: CacheRequest, hit_tokens: int, start_tokens: int) -> None:
        """The request got its blocks and runs from now on. Only the first call for a request counts.

        Args:
            request_id: the engine's name of the request.
            lookup: what the request says of its user.
            hit_tokens: tokens that it takes from HBM.
            start_tokens: all tokens that it need not compute: these, and what a connector loads.

        """
        if request_id in self._running:
            return
        found = self._found.pop(request_id, _NOTHING)
        published = not lookup.request.write or found.common >= len(lookup.history)
        self._running[request_id] = _Running(lookup, found, start_tokens, published)
        self.table.acquire(lookup.key)
        self._waiting.leave(request_id)
        if not published:
            self._flight.lead(request_id, lookup.key, lookup.history)
        # Who starts again was preempted, or what he wanted to load failed: he computes what he has counted before.
        if lookup.counted:
            return
        lookup.counted = True
        self.table.note_request(lookup.key, len(lookup.history))
        if lookup.request.read:
            self._share_with_prefixes(lookup, self._blocks_for(start_tokens) - self._blocks_for(hit_tokens))
            lookup.tiers = {"hbm": hit_tokens} if hit_tokens else {}
            self.stats.history_tokens += len(lookup.history)
            self.stats.hit_tokens += hit_tokens
            self.stats.user_hits += hit_tokens > 0
            self.stats.user_misses += hit_tokens == 0 < len(lookup.history)

    def unpublished(self) -> list[str]:
        """The running requests whose history is to be kept and is not yet."""
        return self._flight.leaders()

    def publish(self, request_id: str, computed_tokens: int, blocks: Sequence[Any], ended: bool = False) -> None:
        """Keep the history of a running request as soon as all of it has been computed.

        Args:
            request_id: one of :meth:`unpublished`.
            computed_tokens: tokens whose KV is in ``blocks`` for certain: the steps that wrote them are over.
            blocks: the request's blocks in order.
            ended: the request has ended and only its blocks are not free yet (a connector still reads them), so what
                there is of the history is all that will ever be.

        """
        running = self._running[request_id]
        whole = computed_tokens >= len(running.lookup.history) and computed_tokens > running.start_tokens
        if whole or ended:
            self._keep(request_id, running, computed_tokens, blocks)
            self._flight.land(request_id)
            running.published = True

    def finish(self, request_id: str, computed_tokens: int, blocks: Sequence[Any]) -> None:
        """The request ends, is aborted or preempted, and its blocks are about to be freed.

        What was computed of its history is kept. A request that never started is only forgotten.

        Args:
            request_id: the engine's name of the request.
            computed_tokens: as for :meth:`publish`.
            blocks: as for :meth:`publish`.

        """
        self._found.pop(request_id, None)
        self._waiting.leave(request_id)
        self._flight.forget(request_id)
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if not running.published:
            self._keep(request_id, running, computed_tokens, blocks)
        if self.listener is not None:
            self.listener.on_request_stopped(request_id)
        self.table.release(running.lookup.key)
        self._keep_to_limit()

    def make_room(self, missing: int, request_id: str = "", lookup: CacheRequest | None = None) -> bool:
        """Let go of ``missing`` blocks for an allocation; of none if all that can go would not be enough.

        Idle users go first, one after the other; the last one keeps the head of his history if his tail is enough. The
        user whose request asks is spared, since his blocks are what it wants to hit, and so are users whose requests
        wait. If that is not enough, these and running users lose the tails that no request of theirs uses, those whose
        request came last first: without that, requests that hold blocks could wait for each other for ever.

        Args:
            missing: how many free blocks the allocation lacks, at least 1.
            request_id: the request that asks.
            lookup: what that request says of its user; ``None`` for an ordinary request.

        Returns:
            Whether blocks were let go, so that the allocation is worth another try.

        """
        if lookup is None:
            return self._make_room(missing, {}) > 0
        found = self._found.get(request_id, _NOTHING)
        current = found.entry is self.table.get(lookup.key)
        wanted = found.hit if current else 0
        self.table.acquire(lookup.key)
        freed = self._make_room(missing, {lookup.key: self._blocks_for(wanted)})
        self.table.release(lookup.key)
        entry = self.table.get(lookup.key)
        if current and entry is not found.entry:
            self._found[request_id] = _Found(entry, min(found.common, entry.num_tokens if entry else 0), wanted)
        return freed > 0

    def keep_free(self, missing: int, spare: CacheRequest | None = None) -> None:
        """Evict idle users, but not ``spare``'s, until ``missing`` blocks were let go or nobody idle is left."""
        if missing <= 0:
            return
        if spare is not None:
            self.table.acquire(spare.key)
        while missing > 0 and (blocks := self._evict(missing)):
            missing -= blocks
        if spare is not None:
            self.table.release(spare.key)

    def reset(self) -> None:
        """Forget all histories (new weights, say). Requests that run now will not be kept either."""
        for request_id, running in self._running.items():
            running.published = True
            self._flight.land(request_id)
        self._found.clear()
        self.share.forget()
        self.table.clear()
        if self.listener is not None:
            self.listener.on_cache_reset()

    def check_integrity(self) -> None:
        """Check every invariant; for tests.

        Raises:
            IntegrityError: an invariant does not hold.

        """
        self.table.check_integrity()
        busy = Counter(running.lookup.key for running in self._running.values())
        busy.update(self._waiting.spared())
        for key in busy.keys() | self.table.user_to_blocks.keys():
            if self.table.num_running(key) != busy[key]:
                raise IntegrityError(
                    f"{key!r}: {self.table.num_running(key)} requests counted, {busy[key]} run or wait"
                )
        leading = {request_id for request_id, running in self._running.items() if not running.published}
        if leading != set(self._flight.leaders()):
            raise IntegrityError("the leaders are not the requests whose history is to be kept")

    def _keep(self, request_id: str, running: _Running, computed_tokens: int, blocks: Sequence[Any]) -> None:
        history = running.lookup.history
        num_tokens = min(computed_tokens, len(history))
        # Beyond what the request started with, nothing of it was computed: a load that failed or still runs included.
        if computed_tokens <= running.start_tokens or num_tokens == 0:
            return
        entry = self.table.get(running.lookup.key)
        if entry is not None:
            common = running.lookup.held_by(entry)
            if common >= num_tokens:
                return
            # An unfinished history does not displace a longer one that may well be asked for again.
            if num_tokens < len(history) and num_tokens <= entry.num_tokens:
                return
        self.table.put(running.lookup.key, history[:num_tokens], blocks[: self._blocks_for(num_tokens)])
        entry = self.table.get(running.lookup.key)
        if self.listener is not None and entry is not None and num_tokens == len(running.lookup.history):
            self.listener.on_history_cached(request_id, running.lookup.key, entry)
        self._keep_to_limit()

    def _share_with_prefixes(self, lookup: CacheRequest, loaded_blocks: int) -> None:
        entry = self.table.get(lookup.key)
        if lookup.request.write:  # What is not kept cannot be lost.
            held = 0 if entry is None else entry.num_blocks
            self.share.user_request(lookup.key, self._blocks_for(len(lookup.history)), held, loaded_blocks)

    def _make_room(self, missing: int, wanted: dict[UserKey, int]) -> int:
        tails: dict[UserKey, int] = {}
        if self.table.num_evictable_blocks < missing:
            for user in reversed(self.table.busy_users()):
                tails[user] = self.table.unused_tail(user, wanted.get(user, 0))
            # Nobody loses anything in vain: the request has to wait for others to end.
            if self.table.num_evictable_blocks + sum(tails.values()) < missing:
                return 0
        freed = 0
        while freed < missing and (blocks := self._evict(missing - freed)):
            freed += blocks
        for user, tail in tails.items():
            entry = self.table.get(user)
            if freed < missing and tail and entry is not None:
                freed += self.table.shorten(user, (entry.num_blocks - tail) * self._block_size)
        return freed

    def _evict(self, at_most: int) -> int:
        users = len(self.table)
        blocks = self.table.evict(at_most)
        self.stats.lru_evictions += users - len(self.table)
        self.stats.evicted_blocks += blocks
        return blocks

    def _keep_to_limit(self) -> None:
        while self._max_users and len(self.table) > self._max_users and self._evict(self._num_blocks):
            pass

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
