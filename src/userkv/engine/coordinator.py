"""``KVCacheCoordinatorForGR``: vLLM's prefix-cache coordinator with users beside hashes."""

from typing import Any

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from userkv.cache.cache_request import CacheRequest
from userkv.cache.settings import CacheSettings
from userkv.cache.user_cache import UserCache
from userkv.engine.request_adapter import cache_request_of


class KVCacheCoordinatorForGR(UnitaryKVCacheCoordinator):
    """Keeps the user block table in step with vLLM's requests and blocks.

    The blocks past a user's history (candidates and output; the field calls them ``user_to_new_blocks``) are in
    vLLM's own ``req_to_blocks`` and are freed when the request ends; the history's blocks are in
    ``users.table.user_to_blocks`` and stay.

    Requests without a user go through vLLM's code unchanged. Scheduler thread only.
    """

    def __init__(self, *args: Any, settings: CacheSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One block of the pool is vLLM's null block, which no request can have.
        self.users = UserCache(self.block_size, self.block_pool.num_gpu_blocks - 1, self.block_pool, settings)
        self.min_free_blocks = settings.min_free_blocks if settings.lru else 0
        self._learns_share = settings.lru and not settings.min_free_blocks
        self.blocks_asked_for = 0
        self._running: dict[str, Request] = {}

    def find_user_cache_hit(self, request: Request, cache_request: CacheRequest) -> tuple[list[KVCacheBlock], int]:
        """The user's history in HBM: ``(blocks, tokens)``, token-exact; ``([], 0)`` if there is none.

        Where the tokens end inside a block, vLLM copies that block for the request before it writes to it.
        """
        hit = self.users.find_hit(request.request_id, cache_request, request.num_tokens)
        return list(hit.blocks), hit.num_tokens

    def start_user_request(
        self, request: Request, cache_request: CacheRequest, hit_tokens: int, start_tokens: int
    ) -> None:
        """The request has its blocks; see :meth:`UserCache.start`."""
        if request.request_id not in self._running:
            self._running[request.request_id] = request
            self.users.start(request.request_id, cache_request, hit_tokens, start_tokens)

    def start_ordinary_request(self, request: Request, start_tokens: int) -> None:
        """A request without a user has its blocks, and need not compute ``start_tokens`` tokens."""
        if (
            self._learns_share and not request.num_preemptions
        ):  # A preempted request has lost its blocks to other requests.
            self.users.share.set_room(self._free_blocks() + self.users.table.num_blocks)
            # The last token is always computed, so its block is never a hit.
            possible = (request.num_tokens - 1) // self.block_size
            self.users.share.count_ordinary_start(request.block_hashes[start_tokens // self.block_size : possible])

    def evict_for_prefixes(self, num_new_tokens: int, cache_request: CacheRequest | None) -> None:
        """Evict idle users before an allocation that would otherwise take the ordinary prefixes' share."""
        share = self.users.share.blocks if self._learns_share else 0
        if share:
            needed, free = -(-num_new_tokens // self.block_size), self._free_blocks()
            if (
                needed <= free + self.users.table.num_evictable_blocks
            ):  # Otherwise it has to wait, and evictions would be in vain.
                self.users.evict_ahead(share + needed - free, cache_request)

    def finish_request(self, request: Request) -> None:
        """The request's blocks are about to be freed: it ended, was aborted or preempted."""
        if cache_request_of(request) is None:
            if self._learns_share:
                whole = _computed_tokens(request) // self.block_size
                self.users.share.count_ordinary_end(request.block_hashes[:whole])
            return
        self._running.pop(request.request_id, None)
        self.users.finish(request.request_id, _computed_tokens(request), self._blocks_of(request.request_id))

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        # Remembered, so that the manager knows how many blocks a failed allocation lacked.
        self.blocks_asked_for = super().get_num_blocks_to_allocate(*args, **kwargs)
        return self.blocks_asked_for

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        # A user's blocks have no hashes; the table takes them once they are computed.
        if cache_request_of(request) is None:
            super().cache_blocks(request, num_computed_tokens)

    def new_step_starts(self) -> None:
        """Keep the histories that the steps so far have completed, so that this step's requests can hit them."""
        super().new_step_starts()
        for request_id in self.users.requests_to_keep():
            request = self._running[request_id]
            blocks = self._blocks_of(request_id)
            self.users.keep_history(request_id, _computed_tokens(request), blocks, ended=request.is_finished())

    def reset_prefix_cache(self) -> bool:
        """Forget all users, then do what vLLM does.

        Users are forgotten even if running requests keep vLLM from resetting: the caller wants no old KV to be hit.
        """
        self.users.reset()
        return super().reset_prefix_cache()

    def _free_blocks(self) -> int:
        return self.block_pool.get_num_free_blocks()

    def _blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        return self.single_type_managers[0].req_to_blocks.get(request_id) or []


def _computed_tokens(request: Request) -> int:
    """Tokens whose KV is written for certain: vLLM counts those of steps in flight as computed already."""
    return max(0, request.num_computed_tokens - request.num_in_flight_tokens)
