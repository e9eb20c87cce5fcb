"""The pool's options of ``userkv serve``: what vLLM is told, and what the user is told who got one wrong."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from userkv.core.errors import InvalidOptionError, InvalidSettingError
from userkv.core.pool_settings import CONNECTOR, PoolSettings
from userkv.core.sizes import GIB
from userkv.serving import pool_options


def parse(*argv: str, default: str = "local") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pool_options.add_options(parser, default)
    return parser.parse_args(argv)


def options(*argv: str, env: dict[str, str] | None = None, without: str = "") -> dict[str, Any] | None:
    return pool_options.pool_settings(parse(*argv), env or {}, without)


def some(*argv: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    found = options(*argv, env=env)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("USERKV_HOME", str(tmp_path))
    return tmp_path


def test_by_default_memory_and_disk_of_this_machine(home: Path) -> None:
    found = some()
    assert found == {"backend": "local", "local_dir": str(home / "pool")}
    settings = PoolSettings.from_extra_config(found)
    assert (settings.local_dram_bytes, settings.local_ssd_bytes) == (GIB, 8 * GIB)


@pytest.mark.parametrize(
    ("argv", "env", "directory"),
    [
        ([], {"USERKV_POOL_DIR": "/var/pool"}, "/var/pool"),
        ([], {"USERKV_POOL_DIR": ""}, "HOME/pool"),
        (["--pool-dir", "/mine"], {"USERKV_POOL_DIR": "/var/pool"}, "/mine"),
        (["--pool-dir", "~/pool"], {}, str(Path.home() / "pool")),
        (["--pool-dir", "some where"], {}, str(Path.cwd() / "some where")),
        ([], {"USERKV_POOL_DIR": "relative"}, str(Path.cwd() / "relative")),
        (["--pool-option", "local_dir=rel"], {}, str(Path.cwd() / "rel")),
        (["--pool-option", "local_dir=~/pool", "--pool-dir", "/mine"], {}, str(Path.home() / "pool")),
        (["--pool-option", "local_dir="], {}, ""),
    ],
)
def test_the_directory(home: Path, argv: list[str], env: dict[str, str], directory: str) -> None:
    assert some(*argv, env=env)["local_dir"] == directory.replace("HOME", str(home))


@pytest.mark.parametrize(
    ("argv", "dram", "ssd"),
    [
        (["--pool-dram", "4GiB", "--pool-ssd", "0"], 4 * GIB, 0),
        (["--pool-dram=0", "--pool-ssd=1.5TB"], 0, 1_500_000_000_000),
        (["--pool-dram", "123456789"], 123_456_789, 8 * GIB),
    ],
)
def test_sizes(argv: list[str], dram: int, ssd: int) -> None:
    settings = PoolSettings.from_extra_config(some(*argv))
    assert (settings.local_dram_bytes, settings.local_ssd_bytes) == (dram, ssd)


def test_mooncake() -> None:
    assert some("--pool", "mooncake") == {"backend": "mooncake"}
    given = some("--pool", "mooncake", "--pool-option", "master_server_address=10.0.0.1:50051")
    assert given == {"backend": "mooncake", "master_server_address": "10.0.0.1:50051"}


def test_no_pool() -> None:
    assert options("--pool", "none") is None
    assert options(without="--no-users") is None
    assert options("--pool", "mooncake", without="--kv-transfer-config") is None
    assert pool_options.pool_settings(parse(default="none"), {}) is None


def test_other_options_of_the_connector() -> None:
    argv = [
        *("--pool-option", "use_layerwise=true"),
        *("--pool-option", "ttl_seconds=1.5"),
        *("--pool-option", "weights_version=2024-05=b"),
        *("--pool-option", "load_threads=3"),
        *("--pool-option", "load_threads=4"),
        *("--pool-option", 'extent_bytes="4MiB"'),
    ]
    settings = PoolSettings.from_extra_config(some(*argv))
    assert settings.use_layerwise is True
    assert settings.ttl_seconds == 1.5
    assert settings.weights_version == "2024-05=b"
    assert settings.load_threads == 4
    assert settings.extent_bytes == 4 << 20


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pool-dram", "much"], """--pool-dram must be a size such as "4GiB" or a number of bytes, not 'much'"""),
        (["--pool-ssd", "-1"], "--pool-ssd must be a size"),
        (["--pool-dram", ""], "not ''"),
        (["--pool-dram", "local_dir"], "not 'local_dir'"),
        (["--pool-dram", "4 GiB 5"], "'4 GiB 5'"),
        (
            ["--pool-dram", "0", "--pool-ssd", "0"],
            "--pool-dram must be more than 0, since the local pool has no SSD tier",
        ),
        (["--pool-option", "local_dram_bytes=much"], "local_dram_bytes must be a size"),
        (
            ["--pool-dram", "0", "--pool-option", "local_ssd_bytes=0"],
            "--pool-dram must be more than 0",
        ),
        (["--pool-option", "local_dir=1"], "local_dir must be text in quotes, not 1"),
        (["--pool-option", "use_layerwise"], "'use_layerwise' has no value; write NAME=VALUE"),
        (["--pool-option", "use_layerwize=true"], "did you mean 'use_layerwise'"),
        (["--pool-option", "use_layerwise=yes"], "must be true or false, not 'yes'"),
        (["--pool-option", "load_threads=0"], "load_threads must be a whole number of 1 or more, not 0"),
        (["--pool-option", "load_threads=[1]"], "load_threads"),
        (["--pool-option", "ttl_seconds=NaN"], "ttl_seconds"),
        (["--pool-option", "=1"], "no option ''"),
        (["--pool-option", "protocol=tcp"], "protocol is an option of the mooncake backend"),
        (["--pool", "mooncake", "--pool-dir", "/x"], "are for --pool local"),
        (["--pool", "mooncake", "--pool-dram", "1GiB"], "are for --pool local"),
        (["--pool", "mooncake", "--pool-option", "local_dir=/x"], "local_dir is an option of the local backend"),
        (["--pool", "none", "--pool-dir", "/x"], "with --pool none there is no pool to set options of"),
        (["--pool", "none", "--pool-option", "a=b"], "with --pool none there is no pool to set options of"),
    ],
)
def test_refused_in_one_sentence(argv: list[str], message: str) -> None:
    with pytest.raises(InvalidSettingError) as error:
        options(*argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_engine_says_of_a_setting_names_the_flag_that_sets_it() -> None:
    args = parse("--pool-option", "local_dram_bytes=1GiB")

    def named(error: InvalidSettingError, options: dict[str, Any] | None) -> str:
        with pytest.raises(InvalidSettingError) as raised, pool_options.naming_flags(args, options):
            raise error
        return str(raised.value)

    directory = InvalidOptionError("local_dir", "'/var/local_dir' cannot be used: name one that exists")
    assert named(directory, {}) == "--pool-dir '/var/local_dir' cannot be used: name one that exists"
    assert named(directory, None) == str(directory)  # The pool's options did not come from these flags.
    assert named(InvalidOptionError("local_dram_bytes", "is 1"), {}) == "local_dram_bytes is 1"
    assert named(InvalidSettingError("local_dir"), {}) == "local_dir"


@pytest.mark.parametrize("without", ["--no-users", "--kv-transfer-config"])
@pytest.mark.parametrize("argv", [["--pool-dir", "/x"], ["--pool-ssd", "0"], ["--pool-option", "load_threads=1"]])
def test_options_of_a_pool_that_there_is_not(without: str, argv: list[str]) -> None:
    with pytest.raises(InvalidSettingError, match=f"with {without} there is no pool.*leave the --pool-"):
        options(*argv, without=without)


def test_a_kind_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--pool", "redis")
    assert "mooncake" in capsys.readouterr().err


def test_what_vllm_is_told() -> None:
    name, text = pool_options.transfer_arguments(some("--pool-option", "use_layerwise=true"))
    assert name == "--kv-transfer-config"
    config = json.loads(text)
    assert config["kv_connector"] == "MooncakeUserStoreConnector"
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    assert PoolSettings.from_extra_config(config["kv_connector_extra_config"]).use_layerwise
    assert pool_options.transfer_arguments(None) == ()


def test_vllm_takes_it() -> None:
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(**pool_options.transfer_config(some()))
    assert config.kv_connector == CONNECTOR
    assert config.is_kv_transfer_instance


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--pool", "none"], "none: KV that leaves the KV cache is computed again"),
        (["--pool", "mooncake"], "Mooncake Store"),
        (["--pool-dir", "/p"], "1 GiB of memory, 8 GiB in /p"),
        (["--pool-dir", "/p", "--pool-dram", "512MiB"], "512 MiB of memory, 8 GiB in /p"),
        (["--pool-ssd", "0"], "1 GiB of memory"),
    ],
)
def test_one_line_for_the_banner(argv: list[str], text: str) -> None:
    assert pool_options.describe(options(*argv)) == text
