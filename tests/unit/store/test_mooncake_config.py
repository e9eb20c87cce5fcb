import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from userkv.core.errors import InvalidSettingError
from userkv.core.pool_settings import MOONCAKE_KEYS
from userkv.core.sizes import GIB
from userkv.store.mooncake import config as module
from userkv.store.mooncake.config import CONFIG_NAME, ENVIRONMENT, MooncakeConfig, is_private, runtime_directory

MASTER = {"MOONCAKE_MASTER": "127.0.0.1:50051"}


def load(
    extra: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, rank: int | None = None
) -> MooncakeConfig:
    return MooncakeConfig.load(extra or {}, rank, {"XDG_RUNTIME_DIR": "/nonexistent", **(env or {})})


def write(path: Path, content: object) -> dict[str, str]:
    path.write_text(json.dumps(content))
    return {"MOONCAKE_CONFIG_PATH": str(path)}


def test_a_master_is_all_it_takes() -> None:
    config = load(env=MASTER)
    assert config.master_server_address == "127.0.0.1:50051"
    assert (config.local_hostname, config.metadata_server, config.protocol) == ("127.0.0.1", "P2PHANDSHAKE", "tcp")
    assert (config.global_segment_size, config.rpc_timeout_ms, config.replica_num) == (GIB, 1000, 1)


def test_every_option_of_the_connector_is_a_setting() -> None:
    assert set(MOONCAKE_KEYS) - {"config_path"} <= {field.name for field in fields(MooncakeConfig)}
    assert set(ENVIRONMENT.values()) <= {field.name for field in fields(MooncakeConfig)}


def test_extra_config_wins_over_environment_wins_over_file(tmp_path: Path) -> None:
    env = write(
        tmp_path / "m.json",
        {"master_server_address": "127.0.0.1:1", "protocol": "rdma", "device_name": "file", "replica_num": 2},
    )
    env |= {"MOONCAKE_MASTER": "127.0.0.1:2", "MOONCAKE_PROTOCOL": "EFA"}
    config = load({"master_server_address": "127.0.0.1:3"}, env)
    assert config.master_server_address == "127.0.0.1:3"
    assert (config.protocol, config.device_name, config.replica_num) == ("efa", "file", 2)


def test_the_connector_may_name_another_file(tmp_path: Path) -> None:
    env = write(tmp_path / "theirs.json", {"master_server_address": "127.0.0.1:1"})
    write(tmp_path / "ours.json", {"master_server_address": "127.0.0.1:2"})
    assert load({"config_path": str(tmp_path / "ours.json")}, env).master_server_address == "127.0.0.1:2"


def test_what_others_have_in_the_file_is_left_alone(tmp_path: Path) -> None:
    content = {"master_server_address": "127.0.0.1:1", "mode": "embedded", "enable_offload": "?", "tenant_id": None}
    assert load(env=write(tmp_path / "m.json", content)).tenant_id == "default"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * GIB),
        ("4gb", 4 * 10**9),
        ("4 G", 4 * GIB),
        ("0.5GB", 500_000_000),
        ("1073741824", GIB),
        (GIB, GIB),
        ("0", 0),
    ],
)
def test_sizes_mean_what_they_mean_in_all_of_userkv(text: object, size: int) -> None:
    assert load({"global_segment_size": text}, MASTER).global_segment_size == size


@pytest.mark.parametrize(
    ("extra", "env", "words"),
    [
        ({}, {}, "userkv pool start"),
        ({}, {"MOONCAKE_MASTER": "10.0.0.5"}, "MOONCAKE_MASTER must be host:port"),
        ({"master_server_address": "host:99999"}, {}, "host:port"),
        ({"master_server_address": 50051}, {}, "must be text"),
        ({"master_server_address": "10.0.0.5:50051"}, {}, "set local_hostname"),
        ({"global_segment_size": "lots"}, MASTER, "4GiB"),
        ({"global_segment_size": -1}, MASTER, "4GiB"),
        ({"global_segment_size": True}, MASTER, "4GiB"),
        ({"global_segment_size": "16MB"}, MASTER, "is 16000000 bytes; lend at least 16 MiB (16777216 bytes)"),
        ({"global_segment_size": "1MiB"}, MASTER, "at least 16 MiB (16777216 bytes)"),
        ({"local_hostname": ""}, MASTER, "must not be empty"),
        ({"enable_ssd_offload": "maybe"}, MASTER, "on or off"),
        ({"enable_ssd_offload": True}, MASTER, "ssd_offload_path"),
        ({"enable_ssd_offload": True, "ssd_offload_path": "/x", "global_segment_size": 0}, MASTER, "ssd_offload_path"),
        ({"local_buffer_size": "1MiB"}, MASTER, "at least 16 MiB (16777216 bytes)"),
        ({}, MASTER | {"MC_RPC_TIMEOUT_MS": "soon"}, "MC_RPC_TIMEOUT_MS must be a whole number"),
        ({"rpc_timeout_ms": 0}, MASTER, "from 1 to"),
        ({"replica_num": 9}, MASTER, "from 1 to"),
        ({}, MASTER | {"MC_STORE_LOCAL_HOT_CACHE_SIZE": "1000000"}, "unset MC_STORE_LOCAL_HOT_CACHE_SIZE"),
        ({"config_path": "/nonexistent/m.json"}, {}, "cannot read /nonexistent/m.json"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    extra: dict[str, object], env: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidSettingError) as error:
        load(extra, env)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]", '"x"', "\udcff"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InvalidSettingError, match="JSON"):
        load(env={"MOONCAKE_CONFIG_PATH": str(path)})


def test_a_wrong_value_in_the_file_names_the_file(tmp_path: Path) -> None:
    env = write(tmp_path / "m.json", {"master_server_address": "127.0.0.1:1", "local_buffer_size": "x"})
    with pytest.raises(InvalidSettingError, match=r"local_buffer_size in .*m\.json must be"):
        load(env=env)


def test_other_machines_and_several_masters() -> None:
    assert load({"master_server_address": "10.0.0.5:1", "local_hostname": "10.0.0.6"}).local_hostname == "10.0.0.6"
    several = {"MOONCAKE_MASTER": "etcd://10.0.0.5:2379;10.0.0.6:2379", "MOONCAKE_LOCAL_HOSTNAME": "10.0.0.7"}
    assert load(env=several).master_server_address.startswith("etcd://")


def test_a_client_process_needs_no_master() -> None:
    config = load({"client_server_address": "127.0.0.1:50052"})
    assert (config.client_server_address, config.master_server_address) == ("127.0.0.1:50052", "")


def test_every_worker_has_files_of_its_own() -> None:
    extra = {"enable_ssd_offload": True, "ssd_offload_path": "/ssd"}
    assert load(extra, MASTER, rank=3).ssd_offload_path == "/ssd/rank-3"
    assert load(extra, MASTER).ssd_offload_path == "/ssd"
    assert load({}, MASTER, rank=3).ssd_offload_path == ""


def test_the_pool_that_was_started_here_is_the_last_resort(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    directory = runtime_directory(env)
    directory.mkdir(mode=0o700)
    write(directory / CONFIG_NAME, {"master_server_address": "127.0.0.1:7", "replica_num": 2})
    assert load(env=env).master_server_address == "127.0.0.1:7"
    assert load(env=env | MASTER).replica_num == 1  # That other pool's settings have nothing to do with it.
    directory.chmod(0o777)
    assert not is_private(directory)
    with pytest.raises(InvalidSettingError, match="not known"):
        load(env=env)


def test_without_a_runtime_directory_it_is_one_per_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "getuid", lambda: 4711)
    assert runtime_directory({}).name == "userkv-4711"


@pytest.mark.parametrize(
    ("extra", "staged"),
    [
        ({}, False),
        ({"global_segment_size": 0}, True),
        ({"global_segment_size": 0, "protocol": "rdma"}, False),
        ({"client_server_address": "127.0.0.1:1", "protocol": "rdma"}, True),
    ],
)
def test_when_kv_goes_by_way_of_the_buffer(extra: dict[str, object], staged: bool) -> None:
    assert load(extra, MASTER).staged is staged
