"""Builds the connector of the scheduler's process from vLLM's configuration."""

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import vllm
from vllm.config import VllmConfig

from userkv.core.pool_settings import PoolSettings
from userkv.engine.manager import KVCacheManagerForGR
from userkv.engine.pool.scheduler.connector_scheduler import ConnectorScheduler
from userkv.engine.pool.scheduler.history_saver import HistorySaver
from userkv.engine.pool.scheduler.namespace import Namespaces, code_fingerprint, weights_fingerprint
from userkv.engine.pool.scheduler.pool_client import PoolClient
from userkv.engine.pool.scheduler.saves import PoolSaves
from userkv.engine.pool.wire.lookup_client import MooncakeLookupClient
from userkv.engine.pool.wire.messages import WorkerInfo
from userkv.models import registry
from userkv.store import checksum

logger = logging.getLogger(__name__)


def build_scheduler(
    config: VllmConfig, settings: PoolSettings, manager: KVCacheManagerForGR, workers: list[WorkerInfo]
) -> tuple[ConnectorScheduler, Namespaces, Callable[[], None]]:
    """The half that runs in the scheduler's process, its namespaces, and a function that ends it."""
    transfer, block_size = config.kv_transfer_config, manager.coordinator.block_size
    assert transfer is not None
    saves: PoolSaves | None = None
    keeper: HistorySaver | None = None
    client = MooncakeLookupClient(
        [worker.endpoint for worker in workers],
        settings.lookup_timeout_ms / 1000,
        lambda rank, notice: saves.saved(notice.job_id, notice.ok, notice.dropped) if saves is not None else None,
    )
    pool = PoolClient(client)
    if settings.saves(transfer.kv_role):
        saves = PoolSaves(
            pool,
            manager.block_pool,
            block_size,
            max(1, settings.extent_bytes // max(worker.block_nbytes for worker in workers)),
            settings.max_queued_saves,
            manager.block_pool.num_gpu_blocks // 2,
            settings.ttl_seconds,
            f"{socket.gethostname()}:{os.getpid()}",
        )
        keeper = HistorySaver(saves, manager.users.table)
        saves.ended = keeper.save_ended
    world_size = config.parallel_config.world_size
    if world_size > 1:
        logger.info("users in the pool are shared with engines of tensor_parallel_size=%d only", world_size)
    namespaces = Namespaces(
        _model_name(config),
        settings.weights_version or _weights_version(config),
        namespace_facts(config, settings, workers),
    )
    half = ConnectorScheduler(
        pool,
        manager.users,
        saves,
        keeper,
        block_size,
        namespaces.of,
        namespaces.renew,
        loads=settings.loads(transfer.kv_role),
        load_async=settings.loads_async,
        save_during_forward=settings.use_layerwise,
    )
    return half, namespaces, client.close


def namespace_facts(config: VllmConfig, settings: PoolSettings, workers: list[WorkerInfo]) -> Any:
    model = config.model_config
    hf_config = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return {
        "config": hf_config,
        "dtype": str(model.dtype),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "block_size": config.cache_config.block_size,
        "world_size": config.parallel_config.world_size,
        "layouts": [worker.layout for worker in workers],
        "layerwise": settings.use_layerwise,
        "checksum": checksum.NAME,
        "vllm": vllm.__version__,
        "code": code_fingerprint(registry.code_files()) if registry.MODELS.keys() & {*model.architectures} else "",
    }


def _model_name(config: VllmConfig) -> str:
    """The model's name without the place where it lies, which may differ between machines."""
    return config.model_config.model.rstrip("/").split("/")[-1]


def _weights_version(config: VllmConfig) -> str:
    if config.load_config.load_format == "dummy":
        return f"dummy-{config.model_config.seed}"
    return weights_fingerprint(config.model_config.model)
