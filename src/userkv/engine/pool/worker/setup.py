"""Builds the connector of one worker from vLLM's configuration."""

import re
import tempfile
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig

from userkv.core.pool_settings import PoolSettings
from userkv.engine.pool.backends import open_backend
from userkv.engine.pool.wire.messages import WorkerInfo
from userkv.engine.pool.worker.connector_worker import ConnectorWorker
from userkv.engine.pool.worker.kv_layout import KVLayout
from userkv.engine.pool.worker.kv_memory import kv_memory
from userkv.engine.pool.worker.mooncake_engine import MooncakeEngine
from userkv.store.user_store import MooncakeUserStore


def build_worker(
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


def _layer_number(name: str) -> tuple[int, str]:
    number = re.search(r"\.(\d+)\.", name)
    return (int(number[1]) if number else -1, name)


def _endpoint(config: VllmConfig, settings: PoolSettings, rank: int) -> str:
    if settings.lookup_rpc_port:
        return f"tcp://127.0.0.1:{settings.lookup_rpc_port + rank}"
    # Made by each worker for itself: readable by this user alone, and short enough for a socket's address.
    return f"ipc://{tempfile.mkdtemp(prefix='userkv-')}/rank-{rank}"
