"""What UserKV adds to vLLM's scheduler: single flight, and the cache's figures for ``/metrics``.

And for each request of a user, where its history came from: see ``output_tiers.py``.
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from userkv.engine import output_tiers
from userkv.engine.manager import KVCacheManagerForGR
from userkv.engine.metrics import Sizes, attach_snapshot
from userkv.engine.request_adapter import cache_request_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


class GRSchedulerMixin(_Base):
    """Goes in front of any vLLM scheduler class."""

    kv_cache_manager: KVCacheManagerForGR
    _sizes_sent: Sizes = (-1, -1, -1)  # So that the metrics exist from the first step on.

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.request_id in self.requests:  # It may have been the end of a stream.
            self.kv_cache_manager.arrived(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return super()._handle_blocked_waiting_request(request) and not self.kv_cache_manager.must_wait(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[Any, Any]:
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        cache_request = cache_request_of(request)
        return kv_params if cache_request is None else output_tiers.attach(kv_params, cache_request.tiers), ec_params

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self._sizes_sent = attach_snapshot(stats, self.kv_cache_manager.users, self._sizes_sent)
        return stats


def with_users(scheduler_cls: type) -> type:
    """The given scheduler class with :class:`GRSchedulerMixin` in front."""
    return type(f"{scheduler_cls.__name__}ForGR", (GRSchedulerMixin, scheduler_cls), {})
