"""Builds the connector of the scheduler's process from vLLM's configuration."""

import logging
import os
import socket
from typing import Any

import vllm
from vllm.config import VllmConfig

from userkv.core.pool_settings import PoolSettings
from userkv.engine.manager import KVCacheManagerForGR
from userkv.engine.pool.scheduler.connector_scheduler import ConnectorScheduler
from userkv.engine.pool.scheduler.history_saver import HistorySaver
from userkv.engine.pool.scheduler.namespace import Namespaces, code_fingerprint, weights_fingerprint
from userkv.engine.pool.scheduler.pool_client import PoolClient
from userkv.engine.pool.scheduler.saves import PoolSaves, SaveSettings
from userkv.engine.pool.wire.lookup_client import MooncakeLookupClient
from userkv.engine.pool.wire.messages import WorkerInfo
from userkv.models import registry
from userkv.store import checksum

logger = logging.getLogger(__name__)


def build_scheduler(
    config: VllmConfig, settings: PoolSettings, manager: KVCacheManagerForGR, workers: list[WorkerInfo]
) -> ConnectorScheduler:
    """The connector of the scheduler's process.

    Args:
        config: vLLM's configuration.
        settings: the connector's settings.
        manager: the engine's KV blocks and users.
        workers: what each rank says of itself, in the order of ranks.

    """
    transfer, world_size = config.kv_transfer_config, config.parallel_config.world_size
    assert transfer is not None
    if world_size > 1:
        logger.info("users in the pool are shared with engines of tensor_parallel_size=%d only", world_size)
    client = MooncakeLookupClient([worker.endpoint for worker in workers], settings.lookup_timeout_ms / 1000)
    pool = PoolClient(client)
    saves = _saves(settings, pool, manager, workers) if settings.saves(transfer.kv_role) else None
    client.start(lambda rank, notice: saves.report_write(notice.job_id, notice.ok, notice.dropped) if saves else None)
    return ConnectorScheduler(
        pool,
        manager.users,
        Namespaces(
            _model_name(config),
            settings.weights_version or _weights_version(config),
            namespace_facts(config, settings, workers),
        ),
        HistorySaver(saves, manager.users.table) if saves is not None else None,
        loads=settings.loads(transfer.kv_role),
        save_during_forward=settings.use_layerwise,
    )


def _saves(
    settings: PoolSettings, pool: PoolClient, manager: KVCacheManagerForGR, workers: list[WorkerInfo]
) -> PoolSaves:
    limits = SaveSettings(
        block_size=manager.coordinator.block_size,
        max_extent_blocks=max(1, settings.extent_bytes // max(worker.block_nbytes for worker in workers)),
        max_saves=settings.max_queued_saves,
        max_held_blocks=manager.block_pool.num_gpu_blocks // 2,
        ttl_seconds=settings.ttl_seconds,
        writer=f"{socket.gethostname()}:{os.getpid()}",
    )
    return PoolSaves(pool, manager.block_pool, limits)


def namespace_facts(config: VllmConfig, settings: PoolSettings, workers: list[WorkerInfo]) -> Any:
    """All that changes the bytes or the meaning of KV, apart from the weights; see :func:`fingerprint`."""
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
