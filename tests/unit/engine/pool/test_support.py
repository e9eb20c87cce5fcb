"""Pools that cannot work are refused before any process starts, with one sentence that says what to change."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from userkv.core.errors import InvalidSettingError, UserKVError
from userkv.core.pool_settings import PoolSettings
from userkv.engine.pool.backends import open_backend
from userkv.serving.demo_model import ensure_demo_model
from userkv.store.local import LocalBackend, index
from userkv.store.local.arena import PAGE


def start(extra: dict[str, Any], transfer: dict[str, Any] | None = None, **engine: Any) -> Any:
    """vLLM's configuration for an engine with the connector."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    options = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **(transfer or {})}
    config = KVTransferConfig(kv_connector="MooncakeUserStoreConnector", kv_connector_extra_config=extra, **options)
    return EngineArgs(
        str(ensure_demo_model()), dtype="float32", enable_prefix_caching=True, kv_transfer_config=config, **engine
    ).create_engine_config()


@pytest.mark.parametrize(
    ("extra", "transfer", "engine", "sentence"),
    [
        ({}, {"kv_load_failure_policy": "fail"}, {}, 'add "kv_load_failure_policy": "recompute"'),
        ({"use_layer_wise": True}, {}, {}, "did you mean 'use_layerwise'"),
        ({"backend": "redis"}, {}, {}, "redis"),
        ({"local_dram_bytes": "999TiB"}, {}, {}, "more than this machine has"),
        ({"lookup_rpc_port": 65535}, {}, {"tensor_parallel_size": 2}, "leaves too few ports"),
        ({}, {}, {"pipeline_parallel_size": 2}, "use tensor parallelism"),
        ({"local_dir": "/proc/userkv"}, {}, {}, "local_dir"),
        ({"backend": "mooncake"}, {}, {}, "Mooncake's master is not known"),
    ],
)
def test_refused_with_one_sentence(
    extra: dict[str, Any],
    transfer: dict[str, Any],
    engine: dict[str, Any],
    sentence: str,
    patched_vllm: pytest.MonkeyPatch,
) -> None:
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"):
        patched_vllm.delenv(name, raising=False)
    patched_vllm.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    with pytest.raises(UserKVError) as refused:
        start(extra, transfer, **engine)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("world_size", "env", "stays"),
    [
        (1, {}, True),
        (1, {"VLLM_ENABLE_USER_KV_LRU": "1"}, False),
        (1, {"USERKV_EVICTION_POLICY": "lru"}, False),
        (2, {}, False),
    ],
)
def test_the_local_pool_evicts_by_the_policy_of_hbm_where_all_of_it_is_in_one_worker(
    world_size: int, env: dict[str, str], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_USER_KV_LRU", raising=False)
    monkeypatch.delenv("USERKV_EVICTION_POLICY", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(index, "GRACE_SECONDS", 0.0)
    settings = PoolSettings.from_extra_config({"local_dram_bytes": world_size * 4 * PAGE})
    with closing(open_backend(settings, world_size, 0)) as backend:
        for user in ["regular"] * 9 + list("abcdefgh"):
            backend.count_request(user)
            backend.put_record(user, user, b"r" * PAGE)
        assert (backend.get_record("regular", "regular") is not None) == stays


def test_a_directory_in_use_is_refused(tmp_path: Path, patched_vllm: pytest.MonkeyPatch) -> None:
    start({"local_dir": str(tmp_path)})
    backend = LocalBackend(0, tmp_path / "rank-0", 1 << 20)
    with pytest.raises(InvalidSettingError, match="in use by another engine"):
        start({"local_dir": str(tmp_path)})
    backend.close()
    start({"local_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("role", "extra", "loads", "saves"),
    [
        ("kv_both", {}, True, True),
        ("kv_producer", {}, False, True),
        ("kv_consumer", {}, True, False),
        ("kv_consumer", {"consumer_is_to_load": False, "consumer_is_to_put": True}, False, True),
    ],
)
def test_what_roles_do(role: str, extra: dict[str, Any], loads: bool, saves: bool) -> None:
    from userkv.core.pool_settings import PoolSettings

    settings = PoolSettings.from_extra_config(extra)
    assert (settings.loads(role), settings.saves(role)) == (loads, saves)


@pytest.mark.parametrize("extra", [{"use_layerwise": True}, {"load_async": False}])
def test_loads_within_a_step_are_refused_with_asynchronous_scheduling(
    extra: dict[str, Any], patched_vllm: pytest.MonkeyPatch
) -> None:
    """vLLM switches it off on CPUs by itself, so the check is called with what a GPU's configuration says."""
    from userkv.engine.pool.transfer_config import check_transfer_config

    config = start(extra)
    config.scheduler_config.async_scheduling = True
    with pytest.raises(UserKVError, match="add --no-async-scheduling"):
        check_transfer_config(config)
