import dataclasses
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from userkv import cli
from userkv.cache.settings import CacheSettings
from userkv.core.errors import InvalidSettingError, UserKVError
from userkv.serving import banner, launch_plan, pool_options, preconditions, served_model
from userkv.serving.launch_plan import LaunchPlan


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def plan(argv: Sequence[str], env: dict[str, str] | None = None, *, on_cpu: bool = True) -> LaunchPlan:
    return launch_plan.plan_launch(cli.parse(["serve", "--port", "0", *argv]), env or {}, on_cpu=on_cpu)


def values(arguments: Sequence[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == option]


def test_defaults_for_a_given_model(model: str) -> None:
    result = plan(["--model", model])
    assert result.served_name == result.model == model
    assert result.port > 0
    assert result.users
    assert values(result.vllm_arguments, "--port") == [str(result.port)]
    assert values(result.vllm_arguments, "--kv-cache-memory-bytes") == [str(2**30)]
    assert {"--enable-prompt-tokens-details", "--enable-prefix-caching"} <= {*result.vllm_arguments}
    assert "--dtype" not in result.vllm_arguments
    assert result.environment == {
        "KV_MANAGER_FOR_GR": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "20",
        "VLLM_PLUGINS": result.environment["VLLM_PLUGINS"],
        "HF_HUB_OFFLINE": "1",
    }
    assert not {"--runner", "--skip-tokenizer-init"} & {*result.vllm_arguments}


def test_plugins_that_add_routes_are_loaded_and_no_other_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.EntryPoints(
        metadata.EntryPoint(name, "module:value", group)
        for name, group in (
            ("userkv", "vllm.general_plugins"),
            ("userkv", "vllm.endpoint_plugins"),
            ("theirs", "vllm.platform_plugins"),
            ("other", "console_scripts"),
        )
    )
    monkeypatch.setattr(metadata, "entry_points", lambda: found)
    assert preconditions.plugins({}) == "theirs,userkv"
    assert preconditions.plugins({"VLLM_PLUGINS": "userkv,mine"}) == "userkv,mine"


def test_a_ranking_model_pools(model: str) -> None:
    config = Path(model) / "config.json"
    config.write_text(json.dumps({"userkv_ranking": {"candidate_marker": 3}}))
    result = plan(["--model", model])
    assert result.ranks
    assert values(result.vllm_arguments, "--runner") == ["pooling"]
    assert "--skip-tokenizer-init" in result.vllm_arguments
    assert "--dtype" not in result.vllm_arguments
    config.write_text(json.dumps({"userkv_ranking": {"candidate_marker": 3}, "dtype": "float32"}))
    assert values(plan(["--model", model]).vllm_arguments, "--dtype") == ["float32"]
    config.write_text(json.dumps({"userkv_ranking": {"candidate_marker": 3}, "torch_dtype": "float32"}))
    assert values(plan(["--model", model]).vllm_arguments, "--dtype") == ["float32"]
    (Path(model) / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in plan(["--model", model]).vllm_arguments
    config.write_text(json.dumps({"userkv_ranking": {"score": "label"}}))
    result = plan(["--model", model])
    assert result.ranks
    assert "--runner" not in result.vllm_arguments


@pytest.mark.parametrize("argv", [[], ["--model", "userkv-demo-ranker"], ["--model", "userkv-demo"]])
def test_bundled_models(monkeypatch: pytest.MonkeyPatch, model: str, argv: list[str]) -> None:
    ensure = "ensure_demo_model" if argv[-1:] == ["userkv-demo"] else "ensure_demo_ranker"
    monkeypatch.setattr(served_model, ensure, lambda: Path(model))
    result = plan(argv)
    assert (result.model, result.served_name) == (model, argv[-1] if argv else "userkv-demo-ranker")
    assert values(result.vllm_arguments, "--dtype") == ["float32"]
    assert values(result.vllm_arguments, "--max-model-len") == ["16384"]


def test_vllm_is_told_nothing_twice(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """It warns of options that it gets twice, as if somebody had made a mistake."""
    (Path(model) / "config.json").write_text(json.dumps({"userkv_ranking": {}, "dtype": "float32"}))
    monkeypatch.setattr(served_model, "ensure_demo_ranker", lambda: Path(model))
    arguments = plan(["--max_model_len=2048"]).vllm_arguments
    assert values(arguments, "--dtype") == ["float32"]
    assert "--max-model-len" not in arguments
    assert arguments[-1] == "--max_model_len=2048"


def test_a_cache_larger_than_the_machine_is_refused_at_once(model: str) -> None:
    with pytest.raises(InvalidSettingError, match=r"--kv-cache-gib 1e\+06 is more than this machine's memory"):
        plan(["--model", model, "--kv-cache-gib", "1e6"])


def test_limits_become_environment(model: str) -> None:
    environment = plan(["--model", model, "--max-users", "0", "--min-free-blocks", "7"]).environment
    assert environment["VLLM_USER_KV_LRU_MAX_USERS"] == "0"
    assert environment["VLLM_USER_KV_LRU_MIN_FREE_BLOCKS"] == "7"


def test_what_is_set_already_stays(model: str) -> None:
    env = {"VLLM_HOST_IP": "10.0.0.1", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "0", "HF_HUB_OFFLINE": "0"}
    assert env.items() <= plan(["--model", model], env).environment.items()


def test_without_users(model: str) -> None:
    result = plan(["--model", model, "--no-users"], {"KV_MANAGER_FOR_GR": "1"})
    assert result.environment["KV_MANAGER_FOR_GR"] == "0"
    assert not result.users


def test_verbose_shows_vllms_log(model: str) -> None:
    result = plan(["--model", model, "--verbose"])
    assert result.environment["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "--uvicorn-log-level" not in result.vllm_arguments


def test_a_hub_model_is_not_kept_offline() -> None:
    result = plan(["--model", "Qwen/Qwen3-0.6B", "--served-model-name", "q"])
    assert (result.model, result.served_name) == ("Qwen/Qwen3-0.6B", "q")
    assert "HF_HUB_OFFLINE" not in result.environment


@pytest.mark.parametrize(
    ("argv", "env", "on_cpu", "size"),
    [
        ([], {}, True, ["1073741824"]),
        ([], {}, False, []),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "2"}, True, []),
        (["--kv-cache-gib", "0.5"], {"VLLM_CPU_KVCACHE_SPACE": "2"}, True, ["536870912"]),
        (["--kv-cache-gib", "0.5"], {}, False, ["536870912"]),
    ],
)
def test_kv_cache_size(model: str, argv: list[str], env: dict[str, str], on_cpu: bool, size: list[str]) -> None:
    result = plan(["--model", model, *argv], env, on_cpu=on_cpu)
    assert values(result.vllm_arguments, "--kv-cache-memory-bytes") == size
    if argv:  # vLLM would let the variable win.
        assert result.environment["VLLM_CPU_KVCACHE_SPACE"] is None


def test_options_for_vllm_come_last(model: str) -> None:
    arguments = plan(["--model", model, "--block-size", "32", "--", "--dtype", "bfloat16"]).vllm_arguments
    assert arguments[-4:] == ["--block-size", "32", "--dtype", "bfloat16"]


def transfer_configs(result: LaunchPlan) -> list[dict[str, Any]]:
    return [json.loads(value) for value in values(result.vllm_arguments, "--kv-transfer-config")]


def test_users_are_kept_in_a_pool_on_this_machine(model: str, tmp_path: Path) -> None:
    result = plan(["--model", model, "--pool-dram", "2GiB"], {"USERKV_POOL_DIR": str(tmp_path)})
    (config,) = transfer_configs(result)
    assert config["kv_connector"] == "MooncakeUserStoreConnector"
    assert config["kv_connector_extra_config"] == {
        "backend": "local",
        "local_dir": str(tmp_path),
        "local_dram_bytes": "2GiB",
    }
    assert pool_options.describe(result.pool) == f"2 GiB of memory, 8 GiB in {tmp_path}"


def test_users_are_kept_in_mooncake(model: str) -> None:
    result = plan(["--model", model, "--pool", "mooncake", "--pool-option", "use_layerwise=true"])
    (config,) = transfer_configs(result)
    assert config["kv_connector_extra_config"] == {"backend": "mooncake", "use_layerwise": True}
    assert pool_options.describe(result.pool) == "Mooncake Store"


@pytest.mark.parametrize("argv", [["--pool", "none"], ["--no-users"]])
def test_without_a_pool(model: str, argv: list[str]) -> None:
    result = plan(["--model", model, *argv])
    assert transfer_configs(result) == []
    assert result.pool is None


@pytest.mark.parametrize(
    "argv",
    [
        ["--kv-transfer-config", '{"kv_connector": "Mine"}'],
        ['--kv-transfer-config={"kv_connector": "Mine"}'],
        ["--kv_transfer_config", '{"kv_connector": "Mine"}'],
        ['--kv_transfer_config={"kv_connector": "Mine"}'],
        ["--kv-transfer-config.kv_connector", "Mine"],
        ["--kv-transfer-config.kv_connector=Mine", "--kv-transfer-config.kv_role=kv_both"],
        ["--", "--kv-transfer-config", '{"kv_connector": "Mine"}'],
    ],
)
def test_somebody_elses_connector_takes_the_pools_place(model: str, argv: list[str]) -> None:
    """However vLLM lets one write it."""
    result = plan(["--model", model, *argv])
    assert "MooncakeUserStoreConnector" not in " ".join(result.vllm_arguments)
    assert result.pool is None
    assert result.vllm_arguments[-1] == argv[-1]
    with pytest.raises(UserKVError, match="with --kv-transfer-config there is no pool"):
        plan(["--model", model, "--pool-ssd", "0", *argv])


def test_a_value_that_looks_like_an_option_of_the_pools(model: str) -> None:
    result = plan(["--model", model, "--served-model-name", "m", "--", "--chat-template", "kv-transfer-config"])
    assert len(transfer_configs(result)) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-users", "many"], "--max-users must be a whole number of 0 or more, not 'many'"),
        (["--min-free-blocks", "-1"], "--min-free-blocks must be a whole number of 0 or more, not '-1'"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib must be more than 0"),
        (["--kv-cache-gib", "nan"], "--kv-cache-gib must be more than 0"),
        (["some-model"], "name the model with --model"),
        (["--model", "/no/such"], "no model directory /no/such"),
        (["--model", "nosuch"], "no model directory nosuch"),
        (["--model", os.path.dirname(__file__)], "has no config.json"),
        (["--port", "70000"], "port 70000"),
        (["--host", "192.0.2.1"], "change --host or --port"),
        (["--pool-dram", "much"], "'much'"),
        (["--no-users", "--pool-dir", "/x"], "with --no-users there is no pool"),
        (["--pool", "mooncake", "--pool-ssd", "1GiB"], "are for --pool local"),
        (["--pool-option", "lod_async=false"], "did you mean 'load_async'"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UserKVError, match=message):
        plan(argv)


def test_port_in_use(taken_port: int) -> None:
    with pytest.raises(UserKVError, match=f"port {taken_port} on 127.0.0.1 is in use"):
        preconditions.available_port("127.0.0.1", taken_port)


@pytest.mark.parametrize(("plugins", "fine"), [(None, True), ("userkv", True), ("a,userkv", True), ("", False)])
def test_plugin_must_be_loaded(plugins: str | None, fine: bool) -> None:
    env = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    if fine:
        preconditions.check_plugin(env)
    else:
        with pytest.raises(UserKVError, match="VLLM_PLUGINS"):
            preconditions.check_plugin(env)


@pytest.mark.parametrize("case", ["port", "model", "pool"])
def test_the_command_fails_with_one_line(case: str, taken_port: int) -> None:
    argv = {
        "port": ["--port", str(taken_port)],
        "model": ["--port", "0", "--model", "/no/such"],
        "pool": ["--pool-dram", "much"],
    }[case]
    command = [sys.executable, "-m", "userkv.cli", "serve", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("userkv: ")


METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="2048",num_gpu_blocks_override="None"} 1.0
"""


def example(host: str = "127.0.0.1", *, users: bool = True) -> LaunchPlan:
    return LaunchPlan(model="/m", served_name="it's", host=host, port=8000, users=users, vllm_arguments=[])


def test_banner() -> None:
    text = banner.render_banner(example(), CacheSettings(max_users=5, min_free_blocks=3), METRICS)
    assert "2048 blocks of 128 tokens, 262144 tokens in all" in text
    assert "at most 5 (VLLM_USER_KV_LRU_MAX_USERS), blocks kept free: 3 (" in text
    assert "as many as ordinary prefixes need" in banner.render_banner(example(), CacheSettings(), METRICS)
    assert text.splitlines()[-1].startswith("curl ")


def test_banner_without_metrics_or_limits() -> None:
    assert "any number" in banner.render_banner(example(), CacheSettings(max_users=0), "")
    assert "no limit" in banner.render_banner(example(), CacheSettings(lru=False), "")
    assert "off (--no-users)" in banner.render_banner(example(users=False), CacheSettings(), "")


def test_curl_line_of_a_ranking_model(tmp_path: Path) -> None:
    (tmp_path / "items.json").write_text(json.dumps(list(range(100, 120))))
    words = shlex.split(banner.curl_line(dataclasses.replace(example(), model=str(tmp_path), ranks=True)))
    assert words[2].endswith("/v1/rank")
    body = json.loads(words[-1])
    assert body["history"] + body["candidates"] == list(range(100, 112))
    assert body["user_id"] == "alice"


def test_curl_line_survives_the_shell() -> None:
    words = shlex.split(banner.curl_line(example()))
    assert words[0] == "curl"
    assert '"model": "it\'s"' in words[-1]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("box", "http://box:8000"),
    ],
)
def test_url_for_clients(host: str, url: str) -> None:
    assert banner.base_url(example(host)) == url
