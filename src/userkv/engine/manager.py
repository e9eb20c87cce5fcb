"""``KVCacheManagerForGR``: where vLLM's scheduler meets the user cache."""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from userkv.cache.cache_request import CacheRequest
from userkv.cache.user_cache import UserCache
from userkv.engine.coordinator import KVCacheCoordinatorForGR
from userkv.engine.request_adapter import cache_request_of


class KVCacheManagerForGR(KVCacheManager):
    """vLLM's manager, asked by user where the request names one. Scheduler thread only."""

    coordinator: KVCacheCoordinatorForGR

    @property
    def users(self) -> UserCache:
        """The users in HBM."""
        return self.coordinator.users

    @property
    def usage(self) -> float:
        """Share of the KV cache that running requests need, 0.0 to 1.0.

        Blocks of users that may be evicted count as free, as vLLM counts the blocks of its prefix cache: routers take
        this figure for load.
        """
        total = self.block_pool.num_gpu_blocks - 1
        free = self.block_pool.get_num_free_blocks() + self.users.table.num_evictable_blocks
        return 1.0 - free / total if total else 0.0

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        cache_request = cache_request_of(request)
        if cache_request is None:
            return super().get_computed_blocks(request)
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        blocks, num_tokens = self.coordinator.find_user_cache_hit(request, cache_request)
        return self.create_kv_cache_blocks((blocks,)), num_tokens, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        cache_request = cache_request_of(request)
        if num_new_tokens != 1:  # The next prompt makes up for what single tokens take.
            self.coordinator.evict_for_prefixes(num_new_tokens + num_external_computed_tokens, cache_request)
        start_tokens = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        while True:
            blocks = super().allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                num_lookahead_tokens,
                num_external_computed_tokens,
                **kwargs,
            )
            if blocks is not None:
                break
            if not self._make_room(request, cache_request):
                return None
        if cache_request is not None:
            self.coordinator.start_user_request(request, cache_request, num_new_computed_tokens, start_tokens)
        elif not request.num_computed_tokens and self.prefix_cache_lookup_enabled(request):
            self.coordinator.start_ordinary_request(request, start_tokens)
        if self.coordinator.min_free_blocks:
            self.users.evict_ahead(self.coordinator.min_free_blocks - self.block_pool.get_num_free_blocks())
        return blocks

    def free(self, request: Request) -> None:
        self.coordinator.finish_request(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self.coordinator.finish_request(request)
        return super().pop_blocks_for_free(request)

    def estimate_cached_tokens(self, request: Request) -> int:
        # vLLM reports what a request added to the prefix cache; for a user that is its history.
        cache_request = cache_request_of(request)
        if cache_request is None:
            return super().estimate_cached_tokens(request)
        return len(cache_request.history) if cache_request.request.write else 0

    def arrived(self, request: Request) -> None:
        """A request waits to be scheduled."""
        cache_request = cache_request_of(request)
        if cache_request is not None:
            self.users.arrive(request.request_id, cache_request)

    def must_wait(self, request: Request) -> bool:
        """Whether a request that has no blocks yet should wait for another one of its user (single flight)."""
        cache_request = cache_request_of(request)
        if cache_request is None or request.num_computed_tokens or not self.prefix_cache_lookup_enabled(request):
            return False
        return self.users.must_wait(request.request_id, cache_request)

    def _make_room(self, request: Request, cache_request: CacheRequest | None) -> bool:
        lacking = self.coordinator.blocks_asked_for - self.block_pool.get_num_free_blocks()
        return self.users.make_room(max(lacking, 1), request.request_id, cache_request)
