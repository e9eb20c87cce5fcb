"""``MooncakeUserStoreConnector``: the pool as a KV connector of vLLM.

vLLM makes one in the scheduler's process and one in each worker. This file only translates vLLM's calls. The work is
done by ``scheduler/connector_scheduler.py`` in the first and by ``worker/connector_worker.py`` in the others.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from userkv.cache.settings import ENABLE
from userkv.core.errors import UnsupportedEngineError
from userkv.core.pool_settings import CONNECTOR, PoolSettings
from userkv.engine.manager import KVCacheManagerForGR
from userkv.engine.pool.metrics import PoolPromMetrics, PoolStats
from userkv.engine.pool.scheduler.connector_scheduler import ConnectorScheduler
from userkv.engine.pool.scheduler.setup import build_scheduler
from userkv.engine.pool.transfer_config import check_transfer_config
from userkv.engine.pool.wire.messages import StepJobs, WorkerInfo
from userkv.engine.pool.worker.connector_worker import ConnectorWorker
from userkv.engine.pool.worker.setup import build_worker
from userkv.engine.pool.worker.spare_cores import spare_cores
from userkv.engine.request_adapter import cache_request_of
from userkv.store.backend import Tier


@dataclass
class PoolConnectorMetadata(KVConnectorMetadata):
    """The step's jobs, from the scheduler to all workers."""

    jobs: StepJobs


@dataclass
class PoolWorkerMetadata(KVConnectorWorkerMetadata):
    """Ended loads, from the workers to the scheduler: for each job, how many ranks, and whether all succeeded."""

    loads: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "PoolWorkerMetadata":
        assert isinstance(other, PoolWorkerMetadata)
        merged = dict(self.loads)
        for job_id, (ranks, ok) in other.loads.items():
            before, all_ok = merged.get(job_id, (0, True))
            merged[job_id] = (before + ranks, all_ok and ok)
        return PoolWorkerMetadata(merged)


@dataclass
class PoolHandshake(KVConnectorHandshakeMetadata):
    """What a worker says of itself, on the way to the scheduler."""

    worker: WorkerInfo


class MooncakeUserStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves and loads users' KV. Options in ``kv_connector_extra_config``: see :class:`PoolSettings`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = check_transfer_config(vllm_config)
        self._manager: KVCacheManagerForGR | None = None
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._worker_info: WorkerInfo | None = None
        self._layers: dict[str, int] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # A save that is dropped is a miss later, no more.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return PoolSettings.from_extra_config(extra_config).use_layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PoolPromMetrics:
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        parallel = self._vllm_config.parallel_config
        # Of several workers, each one's spare cores are those on which the others compute.
        with spare_cores() if parallel.world_size_across_dp == 1 else nullcontext():
            self._worker, self._worker_info = build_worker(
                self._vllm_config, self._settings, kv_caches, self._kv_cache_config.num_blocks, parallel.rank
            )
        self._layers = self._worker.layers

    def get_handshake_metadata(self) -> PoolHandshake | None:
        return None if self._worker_info is None else PoolHandshake(self._worker_info)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PoolConnectorMetadata)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata.jobs)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None and layer_name in self._layers:
            self._worker.wait_for_layer(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None and layer_name in self._layers:
            self._worker.layer_computed(self._layers[layer_name])

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_received() if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> PoolWorkerMetadata | None:
        reports = self._worker.take_reports() if self._worker is not None else None
        return PoolWorkerMetadata({job_id: (1, ok) for job_id, ok in reports.items()}) if reports else None

    # In the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if not isinstance(kv_cache_manager, KVCacheManagerForGR):
            raise UnsupportedEngineError(f"{CONNECTOR} needs the user-granular cache in HBM; set {ENABLE}=1")
        self._manager = kv_cache_manager

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        assert self._manager is not None
        workers = [
            handshake.worker for _, handshake in sorted(metadata.items()) if isinstance(handshake, PoolHandshake)
        ]
        self.use_scheduler(build_scheduler(self._vllm_config, self._settings, self._manager, workers))

    def use_scheduler(self, scheduler: ConnectorScheduler) -> None:
        """Hand the calls of vLLM's scheduler to ``scheduler``. It needs the workers' handshake, so it comes late."""
        assert self._manager is not None
        self._scheduler = scheduler
        self._manager.users.report_to(scheduler)

    def set_weights_version(self, version: str) -> None:
        """From now on KV is of the weights called ``version``; users in HBM are forgotten."""
        assert self._manager is not None
        assert self._scheduler is not None
        self._scheduler.announce_weights(version)
        self._manager.reset_prefix_cache()

    def on_new_request(self, request: Request) -> None:
        cache_request = cache_request_of(request)
        if self._scheduler is not None and cache_request is not None:
            adapter = request.lora_request.lora_int_id if request.lora_request is not None else 0
            self._scheduler.add_request(request.request_id, cache_request, request.num_tokens, adapter)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._scheduler.find_loadable(request.request_id, request.num_tokens, num_computed_tokens)
        return tokens, bool(tokens) and self._settings.loads_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            # Only a load needs the ids; a long history has hundreds of them.
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else ()
            self._scheduler.start_request(request.request_id, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        tier = self._scheduler.hit_tier(request.request_id) if self._scheduler is not None else None
        if not num_external_tokens:
            return {}
        return {CacheHitSource.DISK if tier is Tier.SSD else CacheHitSource.HOST: num_external_tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PoolConnectorMetadata:
        if self._scheduler is None:
            return PoolConnectorMetadata(StepJobs())
        if self._settings.use_layerwise:
            self._save_completed_histories(self._scheduler, scheduler_output)
        return PoolConnectorMetadata(self._scheduler.take_jobs())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(metadata, PoolWorkerMetadata):
            self._scheduler.report_loads(metadata.loads)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finish_request(request.request_id)
        return False, None  # Saves hold the blocks they read.

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        # Otherwise vLLM preempts a request for blocks that a save still holds, and frees nothing by it.
        return self._scheduler is not None and self._scheduler.frees_blocks_soon()

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.needs_step()

    # In both.

    def get_kv_connector_stats(self) -> PoolStats | None:
        part = self._worker or self._scheduler
        return part.take_stats() if part is not None else None

    def reset_cache(self) -> bool:
        # UserCache.reset() has called ConnectorScheduler.on_cache_reset() already.
        return True

    def take_events(self) -> Iterable[Any]:
        return ()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.close()

    def _save_completed_histories(self, scheduler: ConnectorScheduler, output: SchedulerOutput) -> None:
        """Save the histories that this step computes to their end, while it computes them."""
        assert self._manager is not None
        cached = output.scheduled_cached_reqs
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        started.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, start in started.items():
            blocks = self._manager.coordinator.single_type_managers[0].req_to_blocks[request_id]
            scheduler.save_during_step(request_id, start, start + output.num_scheduled_tokens[request_id], blocks)
