"""Mooncake Store with a master on free ports of this machine: vLLM's own connector for it, and ours.

The engine itself lends the pool's memory, which is the fastest that Mooncake can do on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.suite.system import PoolCounters, Prepared, Sizes, System, SystemMissingError
from benchmarks.suite.systems.arguments import LOOPBACK, STOCK, STOCK_ENVIRONMENT, connector, total
from benchmarks.suite.systems.userkv import USERKV, USERKV_ENVIRONMENT
from userkv.core.errors import InvalidSettingError
from userkv.serving.pool_master import Pool, start_master, stop_master

Counters = Mapping[str, float] | None
GotBytes = Callable[[Counters, Counters], int | None]
"""(the master's counters, the engine's) -> bytes read."""

_TRANSFER_BUFFER = 128 << 20
"""Bytes. Hardly used: both connectors move KV between the pool's memory and the engine's own."""


class MooncakeStoreConnector(System):
    """What vLLM ships: one object per block, by the hashes of APC, which is on beside it."""

    name = "mooncake-store-connector"
    title = "MooncakeStoreConnector"

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        with _master(directory) as pool:
            config = directory / "peer.json"
            settings = pool.client_settings() | {"mode": "embedded", "global_segment_size": sizes.pool_bytes}
            settings["local_buffer_size"] = _TRANSFER_BUFFER
            config.write_text(json.dumps(settings), encoding="utf-8")
            env = {
                **STOCK_ENVIRONMENT,
                "MOONCAKE_CONFIG_PATH": str(config),
                "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": LOOPBACK,
                "PYTHONHASHSEED": "0",  # Processes must agree on the hashes of blocks.
            }
            yield _prepared(pool, (*STOCK, *connector("MooncakeStoreConnector")), env, _asked_for)


class UserKVMooncake(System):
    """UserKV with its pool in Mooncake Store."""

    name = "userkv-mooncake"
    title = "UserKV Mooncake"

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        with _master(directory) as pool:
            options = ["--pool", "mooncake"]
            for name, value in {
                "master_server_address": pool.address,
                "metrics_address": pool.metrics_address,
                "global_segment_size": sizes.pool_bytes,
                "local_buffer_size": _TRANSFER_BUFFER,
            }.items():
                options += ["--pool-option", f"{name}={value}"]
            yield _prepared(pool, (*USERKV, *options), USERKV_ENVIRONMENT, _loaded)


@contextmanager
def _master(directory: Path) -> Iterator[Pool]:
    own = directory / "master"
    try:
        pool = start_master(own, LOOPBACK, 0, 0, "")
    except InvalidSettingError as error:
        raise SystemMissingError(f"There is no Mooncake master: {error}") from error
    try:
        yield pool
    finally:
        stop_master(own, pool)


def _prepared(pool: Pool, options: Sequence[str], env: Mapping[str, str], got_bytes: GotBytes) -> Prepared:
    page = f"http://{pool.metrics_address}/metrics"

    def counters(report: Mapping[str, Any]) -> PoolCounters:
        counted = report["page_counters"][page]
        return PoolCounters(
            # Of all objects that got memory; a put of an existing key adds nothing.
            put_bytes=total(counted, "master_value_size_bytes_sum"),
            got_bytes=got_bytes(counted, report["engine_counters"]),
            objects=total(counted, "master_key_count"),
            used_bytes=total(counted, "master_allocated_bytes"),
        )

    return Prepared(options, env, server_pids=(pool.pid,), metrics_pages=(page,), counters=counters)


def _asked_for(master: Counters, engine: Counters) -> int | None:
    """Of all objects whose place was asked for, which vLLM's connector does exactly once for each that it reads."""
    return total(master, "mem_cache_hit_bytes_total")


def _loaded(master: Counters, engine: Counters) -> int | None:
    """Ours asks for places in look-ups, too, so the master would count them twice or more."""
    return total(engine, "userkv_pool_load_bytes_sum")
