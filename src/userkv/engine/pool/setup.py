"""Puts the two halves of the connector together from vLLM's configuration."""

import logging
import os
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig

from userkv.core.errors import InvalidSettingError, UnsupportedEngineError
from userkv.core.pool_settings import CONNECTOR, PoolSettings
from userkv.engine.manager import KVCacheManagerForGR
from userkv.engine.pool.backends import open_backend
from userkv.engine.pool.scheduler.connector_scheduler import ConnectorScheduler
from userkv.engine.pool.scheduler.history_saver import HistorySaver
from userkv.engine.pool.scheduler.namespace import Namespaces, code_fingerprint, weight_files, weights_fingerprint
from userkv.engine.pool.scheduler.pool_client import PoolClient
from userkv.engine.pool.scheduler.saves import PoolSaves
from userkv.engine.pool.wire.lookup_rpc import MooncakeLookupClient
from userkv.engine.pool.worker.connector_worker import ConnectorWorker
from userkv.engine.pool.worker.kv_layout import KVLayout
from userkv.engine.pool.worker.kv_memory import kv_memory
from userkv.engine.pool.worker.mooncake_engine import MooncakeEngine
from userkv.models import registry
from userkv.store import checksum
from userkv.store.user_store import MooncakeUserStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerInfo:
    """What the scheduler must know of a worker: where to call it, and how its KV lies in memory."""

    endpoint: str
    layout: str
    block_nbytes: int


def check_transfer_config(config: VllmConfig) -> PoolSettings:
    """The connector's settings, checked as far as the configuration shows.

    Raises:
        InvalidSettingError: an option cannot be used.
        UnsupportedEngineError: the engine cannot use the pool.

    """
    transfer = config.kv_transfer_config
    assert transfer is not None
    settings = PoolSettings.from_extra_config(transfer.kv_connector_extra_config)
    if transfer.kv_load_failure_policy != "recompute":
        raise InvalidSettingError(
            f"{CONNECTOR} needs requests to survive failed loads; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise UnsupportedEngineError(f"{CONNECTOR} does not work with pipeline parallelism; use tensor parallelism")
    if config.scheduler_config.async_scheduling and settings.loads(transfer.kv_role) and not settings.loads_async:
        # vLLM 0.32 takes the output of a step that was scheduled before a load of the step before it was known to fail.
        raise UnsupportedEngineError(
            "load_async=false and use_layerwise load within a step, which is not safe with asynchronous scheduling; "
            "add --no-async-scheduling"
        )
    if settings.lookup_rpc_port and settings.lookup_rpc_port + config.parallel_config.world_size - 1 > 65535:
        raise InvalidSettingError(
            f"lookup_rpc_port {settings.lookup_rpc_port} leaves too few ports for the ranks; choose a lower one, or 0"
        )
    if config.parallel_config.data_parallel_size > 1 and settings.backend == "local":
        raise UnsupportedEngineError(
            "the local pool belongs to one engine; with data parallelism use the mooncake backend, or no pool"
        )
    if not settings.weights_version and config.load_config.load_format != "dummy":
        weight_files(config.model_config.model)
    return settings


def make_worker(
    config: VllmConfig, settings: PoolSettings, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, rank: int
) -> tuple[ConnectorWorker, WorkerInfo]:
    """The half that runs in the worker of a rank, with the pool opened and the KV memory registered.

    Raises:
        InvalidSettingError: the pool cannot be opened like this.
        UnsupportedEngineError: the KV memory has a layout that cannot be moved block by block.

    """
    ordered = dict(sorted(kv_caches.items(), key=lambda item: _layer_number(item[0])))
    layout = KVLayout.of(ordered, num_blocks)
    world_size = config.parallel_config.world_size
    backend = open_backend(settings, world_size, rank)
    helpers = settings.load_threads * (backend.parallel_gets - 1)
    memory = kv_memory(ordered, layout.largest_piece, settings.load_threads + helpers)
    backend.register(memory.host_spans(layout.spans()))
    num_layers = len(ordered) if settings.use_layerwise else 0
    store = MooncakeUserStore(backend, world_size, rank, num_layers)
    endpoint = _endpoint(config, settings, rank)
    worker = ConnectorWorker(
        MooncakeEngine(
            store,
            layout,
            memory,
            layerwise=settings.use_layerwise,
            parallel_gets=backend.parallel_gets,
            helpers=helpers,
        ),
        store,
        backend,
        memory,
        endpoint,
        load_async=settings.loads_async,
        layerwise=settings.use_layerwise,
        prefetch_layers=settings.layerwise_prefetch_layers,
        load_threads=settings.load_threads,
        max_queued_saves=settings.max_queued_saves,
    )
    kernels = {
        (layer.get_attn_backend().get_name(), getattr(layer, "isa", ""))
        for name, layer in config.compilation_config.static_forward_context.items()
        if name in ordered
    }
    return worker, WorkerInfo(endpoint, f"{layout.description} {sorted(kernels)}", layout.block_nbytes)


def make_scheduler(
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
        _model_name(config), settings.weights_version or _weights_version(config), _facts(config, settings, workers)
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


def _facts(config: VllmConfig, settings: PoolSettings, workers: list[WorkerInfo]) -> Any:
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


def _layer_number(name: str) -> tuple[int, str]:
    number = re.search(r"\.(\d+)\.", name)
    return (int(number[1]) if number else -1, name)


def _endpoint(config: VllmConfig, settings: PoolSettings, rank: int) -> str:
    if settings.lookup_rpc_port:
        return f"tcp://127.0.0.1:{settings.lookup_rpc_port + rank}"
    # Made by each worker for itself: readable by this user alone, and short enough for a socket's address.
    return f"ipc://{tempfile.mkdtemp(prefix='userkv-')}/rank-{rank}"
