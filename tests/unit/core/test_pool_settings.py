from dataclasses import fields

import pytest

from userkv.core.errors import InvalidSettingError
from userkv.core.pool_settings import MOONCAKE_KEYS, PoolSettings


def test_defaults() -> None:
    assert PoolSettings.from_extra_config({}) == PoolSettings()
    settings = PoolSettings()
    assert (settings.backend, settings.extent_bytes) == ("local", 16 * 2**20)
    assert (settings.local_dram_bytes, settings.local_ssd_bytes, settings.local_dir) == (2**30, 2**33, "")


def test_every_option_is_read() -> None:
    config = {
        "backend": "local",
        "load_async": False,
        "use_layerwise": True,
        "layerwise_prefetch_layers": 3,
        "lookup_rpc_port": 5000,
        "weights_version": "2025-01-01",
        "consumer_is_to_load": False,
        "consumer_is_to_put": True,
        "ttl_seconds": 1.5,
        "lookup_timeout_ms": 20,
        "max_queued_saves": 7,
        "load_threads": 4,
        "extent_bytes": "1MiB",
        "local_dir": "/tmp/pool",
        "local_dram_bytes": "2GiB",
        "local_ssd_bytes": 12345,
    }
    assert {field.name for field in fields(PoolSettings)} == {*config, "mooncake"}
    settings = PoolSettings.from_extra_config(config)
    sizes = {"extent_bytes": 2**20, "local_dram_bytes": 2**31}
    assert {name: getattr(settings, name) for name in config} == config | sizes


def test_options_of_mooncake_are_passed_on_as_they_are() -> None:
    options = dict.fromkeys(MOONCAKE_KEYS, "x")
    settings = PoolSettings.from_extra_config({"backend": "mooncake", **options})
    assert dict(settings.mooncake) == options
    with pytest.raises(TypeError):
        settings.mooncake["protocol"] = "tcp"  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("use_layer_wise", "use_layerwise"),
        ("load_asynch", "load_async"),
        ("local_dram_size", "local_dram_bytes"),
        ("master_server", "master_server_address"),
        ("TTL_Seconds", "ttl_seconds"),
    ],
)
def test_the_nearest_option_is_named(name: str, meant: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        PoolSettings.from_extra_config({name: 1})
    assert str(caught.value) == f"kv_connector_extra_config has no option {name!r}; did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["zzz", "mooncake", 5])
def test_an_option_that_resembles_none(name: object) -> None:
    with pytest.raises(InvalidSettingError, match="has no option"):
        PoolSettings.from_extra_config({name: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "redis"),
        ("backend", ["local"]),
        ("load_async", "false"),
        ("use_layerwise", 1),
        ("layerwise_prefetch_layers", 0),
        ("layerwise_prefetch_layers", True),
        ("lookup_rpc_port", -1),
        ("lookup_rpc_port", 65536),
        ("weights_version", 20250101),
        ("ttl_seconds", -1),
        ("ttl_seconds", float("nan")),
        ("ttl_seconds", float("inf")),
        ("ttl_seconds", "1h"),
        ("ttl_seconds", True),
        ("lookup_timeout_ms", 0),
        ("lookup_timeout_ms", 1.5),
        ("max_queued_saves", 0),
        ("load_threads", None),
        ("extent_bytes", 0),
        ("extent_bytes", -1),
        ("local_dir", None),
        ("local_dram_bytes", "four"),
        ("local_dram_bytes", "-1GiB"),
        ("local_ssd_bytes", "1GiBs"),
        ("local_ssd_bytes", True),
        ("local_ssd_bytes", 1e9),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidSettingError, match=f"^{name} must"):
        PoolSettings.from_extra_config({name: value})


@pytest.mark.parametrize(
    "config",
    [
        {"local_dram_bytes": 0},
        {"local_dram_bytes": 0, "local_dir": "/tmp/pool", "local_ssd_bytes": 0},
    ],
)
def test_a_local_backend_needs_a_tier(config: dict[str, object]) -> None:
    with pytest.raises(InvalidSettingError, match="local_dram_bytes must be more than 0"):
        PoolSettings.from_extra_config(config)


def test_a_local_backend_on_disk_alone() -> None:
    assert PoolSettings.from_extra_config({"local_dram_bytes": 0, "local_dir": "/tmp/pool"}).local_dram_bytes == 0


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"protocol": "tcp"}, 'protocol is an option of the mooncake backend.*"backend": "mooncake"'),
        ({"backend": "mooncake", "local_dir": "/x"}, 'local_dir is an option of the local backend.*"backend": "local"'),
    ],
)
def test_options_of_the_other_backend(config: dict[str, object], advice: str) -> None:
    with pytest.raises(InvalidSettingError, match=advice):
        PoolSettings.from_extra_config(config)


@pytest.mark.parametrize(
    ("config", "role", "loads", "saves"),
    [
        ({}, "kv_both", True, True),
        ({}, "kv_producer", False, True),
        ({}, "kv_consumer", True, False),
        ({"consumer_is_to_load": False}, "kv_consumer", False, False),
        ({"consumer_is_to_put": True}, "kv_consumer", True, True),
        ({"consumer_is_to_load": False, "consumer_is_to_put": True}, "kv_both", True, True),
        ({"consumer_is_to_load": True, "consumer_is_to_put": True}, "kv_producer", False, True),
    ],
)
def test_roles(config: dict[str, object], role: str, loads: bool, saves: bool) -> None:
    settings = PoolSettings.from_extra_config(config)
    assert (settings.loads(role), settings.saves(role)) == (loads, saves)


@pytest.mark.parametrize("role", [None, "both"])
def test_unknown_roles(role: str | None) -> None:
    with pytest.raises(InvalidSettingError, match="kv_role must be"):
        PoolSettings().loads(role)
    with pytest.raises(InvalidSettingError, match="kv_role must be"):
        PoolSettings().saves(role)


def test_layerwise_loads_are_never_asynchronous() -> None:
    assert PoolSettings().loads_async
    assert not PoolSettings(load_async=False).loads_async
    assert not PoolSettings(use_layerwise=True).loads_async
