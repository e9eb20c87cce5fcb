"""A medium for vLLM's ``OffloadingConnector`` on a CPU: the connector's own spec refuses to copy without a GPU.

The scheduler's half is vLLM's own: its manager with its LRU. The worker's half copies blocks between the engine's KV
cache and host memory in one thread, in the order of submission, so that the engine computes meanwhile; torch lets go of
Python's lock while it copies. Named by ``spec_module_path`` and ``spec_name`` in ``kv_connector_extra_config``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from userkv.engine.pool.worker.spare_cores import spare_cores

OBJECTS = "vllm:kv_offload_cpu_chunks"
USED_BYTES = "vllm:kv_offload_cpu_bytes"
"""Gauges of the pool, on vLLM's way from the scheduler to Prometheus."""


class CountingManager(CPUOffloadingManager):
    """vLLM's manager, which also tells how full it is. One thread, the scheduler's."""

    def __init__(self, chunk_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self._chunk_bytes = chunk_bytes

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = super().get_stats() or OffloadingConnectorStats()
        held = self._num_allocated_chunks - len(self._free_list)
        stats.set_gauge(OBJECTS, held)
        stats.set_gauge(USED_BYTES, held * self._chunk_bytes)
        return stats


class CopyingWorker(OffloadingWorker):
    """Copies whole blocks of all layers in a thread of its own. Calls come from the engine's thread alone.

    caches: the engine's KV, int8 tensors ``[blocks, bytes of a block]``, one per layer. chunks: blocks in host memory.
    """

    def __init__(self, caches: Sequence[torch.Tensor], chunks: int) -> None:
        self._caches = list(caches)
        self._host = [torch.zeros((chunks, cache.shape[1]), dtype=torch.int8) for cache in caches]  # Touched already.
        self._thread = ThreadPoolExecutor(1, "offload", initializer=torch.set_num_threads, initargs=(1,))
        with spare_cores():  # As UserKV's own transfers.
            self._thread.submit(int).result()
        self._running: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, self._caches, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, self._host, src_spec, self._caches, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, running in self._running.items() if running.done()]
        return [self._running.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._running.keys():
            self._running[job_id].result()

    def shutdown(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _submit(
        self,
        job_id: int,
        sources: Sequence[torch.Tensor],
        source_spec: LoadStoreSpec,
        targets: Sequence[torch.Tensor],
        target_spec: LoadStoreSpec,
    ) -> bool:
        assert isinstance(source_spec, GPULoadStoreSpec | CPULoadStoreSpec)
        assert isinstance(target_spec, GPULoadStoreSpec | CPULoadStoreSpec)
        pairs = sorted(zip(source_spec.block_ids.tolist(), target_spec.block_ids.tolist(), strict=True))
        self._running[job_id] = self._thread.submit(_copy, job_id, sources, targets, runs(pairs))
        return True


class TorchOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec with a worker that runs on a CPU, for one rank and one block per chunk.

    Raises:
        ValueError: the engine has another layout of its KV cache.

    """

    BLOCK_SIZE_ALIGNMENT = 1  # Blocks lie in plain tensors; nothing is lost between them.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            **super().build_metric_definitions(extra_config),
            OBJECTS: OffloadingGaugeMetadata("Blocks in host memory."),
            USED_BYTES: OffloadingGaugeMetadata("Bytes of the blocks in host memory."),
        }

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if config.parallel.world_size != 1 or self.blocks_per_chunk != 1:
            raise ValueError("TorchOffloadingSpec is for one rank and one block per chunk")
        self._counting = CountingManager(self.kv_bytes_per_chunk, num_chunks=self.num_chunks)
        self._copier: CopyingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        return self._counting

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copier is None:
            self._copier = CopyingWorker([cache.tensor for cache in kv_caches.tensors], self.num_chunks)
        return self._copier


def runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first target, length) of the stretches in sorted (source, target) pairs where both count up."""
    found: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if found and (source - found[-1][2], target - found[-1][2]) == found[-1][:2]:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((source, target, 1))
    return found


def _copy(
    job_id: int, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stretches: list[tuple[int, int, int]]
) -> TransferResult:
    started = time.perf_counter()
    size = 0
    for source, target in zip(sources, targets, strict=True):
        for first, to, length in stretches:
            target[to : to + length].copy_(source[first : first + length])
        size += sum(length for *_, length in stretches) * source.shape[1]
    return TransferResult(job_id, True, size, time.perf_counter() - started)
