"""vLLM's ``OffloadingConnector``: blocks that are computed are copied to host memory, LRU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.suite.system import PoolCounters, Prepared, Sizes, System
from benchmarks.suite.systems.arguments import STOCK, STOCK_ENVIRONMENT, connector, total

_SPEC_MODULE = "benchmarks.suite.peers.cpu_offloading_spec"


class Offloading(System):
    """With a medium of ours, for vLLM's own wants a GPU; APC is on beside it."""

    name = "offloading"
    title = "vLLM OffloadingConnector"

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        option = connector(
            "OffloadingConnector",
            spec_name="TorchOffloadingSpec",
            spec_module_path=_SPEC_MODULE,
            cpu_bytes_to_use=sizes.pool_bytes,
        )
        yield Prepared((*STOCK, *option), STOCK_ENVIRONMENT, counters=_counters)


def _counters(report: Mapping[str, Any]) -> PoolCounters:
    counted = report["engine_counters"]
    return PoolCounters(
        put_bytes=total(counted, "vllm:kv_offload_store_bytes_total"),
        got_bytes=total(counted, "vllm:kv_offload_load_bytes_total"),
        objects=total(counted, "vllm:kv_offload_cpu_chunks"),
        used_bytes=total(counted, "vllm:kv_offload_cpu_bytes"),
    )
