"""UserKV without a pool, and with the one of this machine's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.suite.system import PoolCounters, Prepared, Sizes, System
from benchmarks.suite.systems.arguments import total
from userkv.cache import settings

USERKV = ("--engine-arg", "enable_prefix_caching=true")
"""Options of every UserKV system."""

USERKV_ENVIRONMENT: Mapping[str, str] = {settings.MAX_USERS: "0"}
"""HBM holds as many users as there are blocks for; the peers have no such limit either."""


class UserKVHbm(System):
    """The user-granular cache in the engine's own memory alone."""

    name = "userkv-hbm"
    title = "UserKV HBM"

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        yield Prepared((*USERKV, "--pool", "none"), USERKV_ENVIRONMENT)


class UserKVLocal(System):
    """With the local pool, in memory only."""

    name = "userkv-local"
    title = "UserKV local"
    options: tuple[str, ...] = ()

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        pool = ("--pool", "local", "--pool-dir", str(directory), "--pool-dram", str(sizes.pool_bytes))
        yield Prepared((*USERKV, *pool, "--pool-ssd", "0", *self.options), USERKV_ENVIRONMENT, counters=_local_counters)


class UserKVLayerwise(UserKVLocal):
    """The local pool, moved layer by layer while other layers compute."""

    name = "userkv-layerwise"
    title = "UserKV layerwise"
    options = ("--pool-option", "use_layerwise=true")


def _local_counters(report: Mapping[str, Any]) -> PoolCounters:
    counted = report["engine_counters"]
    return PoolCounters(
        put_bytes=total(counted, "userkv_pool_save_bytes_sum"),
        got_bytes=total(counted, "userkv_pool_load_bytes_sum"),
        used_bytes=total(counted, "userkv_pool_used_bytes"),
    )
