"""The systems of the benchmark suite: their command lines, and what their pools count."""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.suite.run import replay_command
from benchmarks.suite.system import PoolCounters, Prepared, Sizes, SystemMissingError
from benchmarks.suite.systems import SYSTEMS, lmcache, mooncake
from benchmarks.suite.systems.arguments import total

from userkv.core.errors import InvalidSettingError
from userkv.replay import cli
from userkv.serving.pool_master import Pool

SIZES = Sizes(block_size=128, hbm_blocks=189, pool_bytes=1 << 30, token_bytes=8192, max_model_len=4096)
STOCK = ("no-cache", "apc", "offloading", "mooncake-store-connector", "lmcache")
WITH_SERVERS = ("mooncake-store-connector", "lmcache", "userkv-mooncake")

Prepare = Callable[[str], AbstractContextManager[Prepared]]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Prepares a system, with a master and a server that are not there."""
    pool = Pool(os.getpid(), 0.0, "127.0.0.1", 50051, 9003, "")
    monkeypatch.setattr(mooncake, "start_master", lambda *arguments: pool)
    monkeypatch.setattr(mooncake, "stop_master", lambda *arguments: True)

    @contextmanager
    def server(*arguments: object) -> Iterator[psutil.Process]:
        yield psutil.Process()

    monkeypatch.setattr(lmcache, "_server", server)
    monkeypatch.setattr(lmcache, "_free_ports", lambda: (5555, 8080))
    monkeypatch.setattr(lmcache, "VENV", tmp_path / "venv")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    return lambda name: SYSTEMS[name].prepare(SIZES, tmp_path)


def options_of(prepared: Prepared) -> dict[str, Any]:
    """The whole command line, as our own parser understands it."""
    command = [*replay_command(prepared, Path("w.jsonl"), SIZES, Path("m"), 8, Path("r.json"))]
    assert command[:3] == [str(prepared.python), "-m", "userkv.cli"]
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(required=True))
    return vars(parser.parse_args(command[3:]))


def test_requests_that_have_times_come_at_them(prepare: Prepare) -> None:
    with prepare("apc") as prepared:
        command = replay_command(prepared, Path("w.jsonl"), SIZES, Path("m"), None, Path("r.json"))
    assert command[command.index("--speed") + 1] == "1"
    assert "--concurrency" not in command


def engine_arguments(prepared: Prepared) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in options_of(prepared)["engine_arg"])


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_systems_get_the_same_engine_and_work(name: str, prepare: Prepare) -> None:
    assert SYSTEMS[name].name == name
    with prepare(name) as prepared:
        options, arguments = options_of(prepared), engine_arguments(prepared)
    assert [options[key] for key in ("file", "offline", "json", "concurrency")] == ["w.jsonl", "m", "r.json", "8"]
    assert [arguments[key] for key in ("num_gpu_blocks_override", "block_size", "max_model_len")] == [
        *("189", "128", "4096")
    ]
    assert arguments["enable_prefix_caching"] == ("false" if name == "no-cache" else "true")
    # Peers run without users and without our plugin; ours with both.
    assert options["no_users"] is (name in STOCK)
    assert prepared.env.get("VLLM_PLUGINS") == ("" if name in STOCK else None)


@pytest.mark.parametrize("name", SYSTEMS)
def test_servers_beside_the_engine_are_measured(name: str, prepare: Prepare) -> None:
    with prepare(name) as prepared:
        options = options_of(prepared)
    assert options["cpu_of"] == ([str(os.getpid())] if name in WITH_SERVERS else [])
    assert options["metrics"] == [*prepared.metrics_pages]
    assert len(prepared.metrics_pages) == len(options["cpu_of"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no-cache", None),
        ("apc", None),
        ("offloading", "OffloadingConnector"),
        ("mooncake-store-connector", "MooncakeStoreConnector"),
        ("lmcache", "LMCacheMPConnector"),
        ("userkv-hbm", None),
    ],
)
def test_connectors(name: str, expected: str | None, prepare: Prepare) -> None:
    with prepare(name) as prepared:
        transfer = json.loads(engine_arguments(prepared).get("kv_transfer_config", "{}"))
    assert transfer.get("kv_connector") == expected


def test_all_pools_have_the_same_memory(prepare: Prepare) -> None:
    with prepare("offloading") as prepared:
        transfer = json.loads(engine_arguments(prepared)["kv_transfer_config"])
        assert transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] == SIZES.pool_bytes
    with prepare("mooncake-store-connector") as prepared:
        config = json.loads(Path(prepared.env["MOONCAKE_CONFIG_PATH"]).read_text())
        assert config["global_segment_size"] == SIZES.pool_bytes
    with prepare("userkv-mooncake") as prepared:
        assert f"global_segment_size={SIZES.pool_bytes}" in options_of(prepared)["pool_option"]
    for name in ("userkv-local", "userkv-layerwise"):
        with prepare(name) as prepared:
            options = options_of(prepared)
        assert (options["pool"], options["pool_dram"], options["pool_ssd"]) == ("local", str(SIZES.pool_bytes), "0")
        assert ("use_layerwise=true" in options["pool_option"]) is (name == "userkv-layerwise")


def test_lmcache_runs_where_it_is_installed(prepare: Prepare, tmp_path: Path) -> None:
    with prepare("lmcache") as prepared:
        assert prepared.python == tmp_path / "venv" / "bin" / "python"
        assert (Path(prepared.env["PYTHONPATH"]) / "userkv" / "cli.py").is_file()
    prepared.python.unlink()
    with pytest.raises(SystemMissingError, match="make bench-peers"), prepare("lmcache"):
        pass


def test_no_master(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Pool:
        raise InvalidSettingError("Mooncake is not installed")

    monkeypatch.setattr(mooncake, "start_master", refuse)
    with pytest.raises(SystemMissingError, match="Mooncake is not installed"), prepare("userkv-mooncake"):
        pass


BLOCK = SIZES.block_size * SIZES.token_bytes
LOCAL = {
    "userkv_pool_save_bytes_sum": 100.0,
    "userkv_pool_save_bytes_count": 3.0,
    "userkv_pool_load_bytes_sum": 50.0,
    'userkv_pool_used_bytes{tier="dram"}': 90.0,
    'userkv_pool_used_bytes{tier="ssd"}': 2.0,
}
OFFLOADING = {
    "vllm:kv_offload_store_bytes_total": 100.0,
    "vllm:kv_offload_load_bytes_total": 50.0,
    "vllm:kv_offload_cpu_chunks": 7.0,
    "vllm:kv_offload_cpu_bytes": 92.0,
}
MASTER = {
    "master_value_size_bytes_sum": 100.0,
    "master_value_size_bytes_count": 7.0,
    "mem_cache_hit_bytes_total": 150.0,
    "master_key_count": 7.0,
    "master_allocated_bytes": 92.0,
}
SERVER = {
    'lmcache_mp_l1_write_chunks_total{l1_tag="_default"}': 8.0,
    'lmcache_mp_num_chunks_loaded_total{worker_id="1"}': 3.0,
    'lmcache_mp_l1_memory_usage_bytes{backend="dram",l1_tag="_default"}': 7.0 * BLOCK,
}


@pytest.mark.parametrize(
    ("name", "engine", "page", "expected"),
    [
        ("apc", {}, {}, PoolCounters()),
        ("userkv-hbm", {"userkv_hit_tokens_total": 5.0}, {}, PoolCounters()),
        ("userkv-local", LOCAL, {}, PoolCounters(100, 50, None, 92)),
        ("userkv-layerwise", LOCAL, {}, PoolCounters(100, 50, None, 92)),
        ("offloading", OFFLOADING, {}, PoolCounters(100, 50, 7, 92)),
        ("mooncake-store-connector", {}, MASTER, PoolCounters(100, 150, 7, 92)),
        ("userkv-mooncake", LOCAL, MASTER, PoolCounters(100, 50, 7, 92)),
        ("lmcache", {}, SERVER, PoolCounters(8 * BLOCK, 3 * BLOCK, 7, 7 * BLOCK)),
    ],
)
def test_what_pools_count(
    name: str, engine: dict[str, float], page: dict[str, float], expected: PoolCounters, prepare: Prepare
) -> None:
    with prepare(name) as prepared:
        report = {"engine_counters": engine, "page_counters": dict.fromkeys(prepared.metrics_pages, page)}
        assert prepared.counters(report) == expected
        unknown = {"engine_counters": None, "page_counters": dict.fromkeys(prepared.metrics_pages)}
        assert prepared.counters(unknown) == PoolCounters()


def test_totals_are_over_labels_of_that_very_metric() -> None:
    counters = {"a": 1.0, 'a{x="1"}': 2.0, 'a{x="2"}': 3.0, "a_b": 10.0, 'ab{x="1"}': 20.0}
    assert (total(counters, "a"), total(counters, "b"), total(None, "a")) == (6, 0, None)
