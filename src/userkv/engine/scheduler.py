"""What UserKV adds to vLLM's scheduler: single flight, and the cache's figures on their way to ``/metrics``."""

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from userkv.engine.manager import KVCacheManagerForGR
from userkv.engine.metrics import attach_snapshot

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


class GRSchedulerMixin(_Base):
    """Goes in front of any vLLM scheduler class."""

    kv_cache_manager: KVCacheManagerForGR

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return super()._handle_blocked_waiting_request(request) and not self.kv_cache_manager.must_wait(request)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            attach_snapshot(stats, self.kv_cache_manager.users)
        return stats


def with_users(scheduler_cls: type) -> type:
    """The given scheduler class with :class:`GRSchedulerMixin` in front."""
    return type(f"{scheduler_cls.__name__}ForGR", (GRSchedulerMixin, scheduler_cls), {})
