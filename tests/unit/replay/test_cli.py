"""``userkv replay`` and ``userkv generate``: options, exit codes and output."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_model_server import FakeModelServer
from userkv.core.errors import InvalidInputFileError, InvalidSettingError
from userkv.logs.workload_file import read_workload
from userkv.replay import engine_target
from userkv.replay.cli import add_parsers

LOG = "userId,movieId,rating,timestamp\n" + "".join(f"{n % 3 + 1},{n},4.0,{n}\n" for n in range(60))


@pytest.fixture
def server() -> Iterator[FakeModelServer]:
    with FakeModelServer() as running:
        yield running


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "ratings.csv"
    path.write_text(LOG)
    return path


def userkv(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args([str(word) for word in words])
    return int(args.run(args))


def test_a_log_is_replayed(server: FakeModelServer, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--every", 5, "--candidates", "3:4", "--phases", 2)
    assert userkv("replay", log, "--server", server.url, *options) == 0
    rows = {line[:11].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["total"][1:3] == ["12", "0"]
    assert rows["first visit"][2] == "3"  # its name is two words
    assert userkv("replay", log, "--server", server.url, *options, "--json") == 0
    # 20 events a user, a request every 5: histories of 5, 10, 15 and 20 items, two tokens each.
    assert json.loads(capsys.readouterr().out)["total"]["history_tokens"] == 3 * (5 + 10 + 15 + 20) * 2
    assert len(server.bodies) == 2 * (12 + 1)  # one warm-up request in each run


def test_tiers_are_those_of_the_run(server: FakeModelServer, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.tier_of = {"2": "dram", "3": "ssd"}
    options = ("--server", server.url, "--every", 5, "--candidates", 3)
    # The log's users are cached from the first run on, which must not count in the second.
    for _ in range(2):
        assert userkv("replay", log, *options, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        found, total = report["tiers"], report["total"]
        assert found["history"] == total["history_tokens"]
        assert found["hbm"] == found["dram"] == found["ssd"] > 0
        assert 3 * found["hbm"] == round(total["history_hit_ratio"] * total["history_tokens"])
        assert found["computed"] == found["history"] - 3 * found["hbm"]
    throw_away = server.bodies[-1]
    assert (len(throw_away["prompt"]), "kv_transfer_params" in throw_away) == (2, False)
    assert userkv("replay", log, *options, "--no-users", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tiers"] is None


def test_a_server_that_does_not_count_has_no_tiers(
    server: FakeModelServer, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert userkv("replay", log, "--server", server.url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tiers"] is None


def test_offline_pools(monkeypatch: pytest.MonkeyPatch, log: Path, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    class Started(Exception):  # noqa: N818 - no error
        pass

    class Target:
        def __init__(self, model_dir: Path, engine_args: dict[str, Any], **options: Any) -> None:
            given.append(engine_args)
            raise Started

    monkeypatch.setattr(engine_target, "EngineTarget", Target)
    for options in ((), ("--pool", "local", "--pool-dir", tmp_path / "p", "--pool-dram", "1MiB")):
        with pytest.raises(Started):
            userkv("replay", log, "--offline", tmp_path, *options)
    without, local = given
    assert "kv_transfer_config" not in without
    assert local["kv_transfer_config"]["kv_connector"] == "MooncakeUserStoreConnector"
    assert local["kv_transfer_config"]["kv_connector_extra_config"] == {
        "backend": "local",
        "local_dir": str(tmp_path / "p"),
        "local_dram_bytes": "1MiB",
    }


def test_failures_give_exit_code_1(
    server: FakeModelServer, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.misbehave = {"2": 400}
    out = tmp_path / "report.json"
    assert userkv("replay", log, "--server", server.url, "--json", out) == 1
    assert "2 of 6 requests failed" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["failures"] == {"HTTP 400: no luck for 2": 2}
    assert report["input"] == {"file": str(log), "format": "ratings", "skipped_lines": 0, "skipped_examples": []}
    expected = {"every": 10, "candidates": [32, 64], "min_history": 1, "max_history": 4000, "seed": 0}
    assert report["settings"]["log"] == expected


def test_skipped_lines_are_told(server: FakeModelServer, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(LOG + "torn\n")
    with pytest.raises(InvalidInputFileError, match="line 62: 1 fields"):
        userkv("replay", log, "--server", server.url)
    assert server.bodies == []
    assert userkv("replay", log, "--server", server.url, "--skip-bad", "--json") == 0
    captured = capsys.readouterr()
    assert "skipped 1 malformed lines" in captured.err
    assert "line 62: 1 fields where the header has 4" in captured.err
    assert json.loads(captured.out)["input"]["skipped_lines"] == 1


def test_generated_and_replayed(server: FakeModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.jsonl.gz"
    sizes = ("--users", 5, "--requests", 30, "--median-history", 20, "--candidates", 4, "--digits", 3)
    assert userkv("generate", path, *sizes) == 0
    assert len(read_workload(path).requests) == 30
    options = ("--server", server.url, "--max-requests", 10, "--no-users", "--warmup", 0, "--speed", "1e9")
    assert userkv("replay", path, *options, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    used = report["settings"]
    assert (report["total"]["requests"], used["tokens_per_item"], used["users"]) == (10, 3, False)
    assert report["input"]["format"] == "workload"
    assert not any("kv_transfer_params" in body for body in server.bodies)


def test_generate_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert userkv("generate", "-", "--requests", 3, "--median-history", 5, "--candidates", "2:2") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"userkv_workload": 1}
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "either --server URL or --offline"),
        (("--server", "http://h", "--offline", "m"), "either --server URL or --offline"),
        (("--server", "h:8000"), "must start with http://"),
        (("--server", "http://127.0.0.1:9"), "cannot be reached"),
        (("--offline", "/nowhere"), "no directory"),
        (("--offline", ".", "--model", "m"), "--model is for --server"),
        (("--offline", "."), "config.json does not tell"),
        (("--offline", ".", "--engine-arg", "x"), "--engine-arg must be NAME=VALUE"),
        (("--server", "http://h", "--engine-arg", "a=1"), "--engine-arg is for --offline"),
        (("--server", "http://h", "--pool", "local"), "with --server there is no pool to choose"),
        (("--server", "http://h", "--pool-dir", "p"), "with --server there is no pool to set options of"),
        (("--offline", ".", "--no-users", "--pool", "local"), "with --no-users there is no pool to choose"),
        (
            ("--offline", ".", "--pool-dir", "p"),
            "with --pool none there is no pool to set options of; say --pool local",
        ),
        (("--offline", ".", "--pool", "local", "--pool-dram", "x"), "--pool-dram must be a size"),
        (
            ("--offline", ".", "--pool", "local", "--engine-arg", 'kv_transfer_config={"kv_connector":"X"}'),
            "with --engine-arg kv_transfer_config there is no pool to choose",
        ),
        (("--server", "http://h", "--format", "csv"), "--format must be one of otto, ratings, kuairand, workload"),
        (("--server", "http://h", "--every", "0"), "--every must be a whole number of 1 or more, not '0'"),
        (("--server", "http://h", "--every", "x"), "--every must be"),
        (("--server", "http://h", "--candidates", "9:3"), "--candidates must be LOW:HIGH"),
        (("--server", "http://h", "--candidates", "a:b"), "--candidates must be LOW:HIGH"),
        (("--server", "http://h", "--min-history", "-1"), "--min-history must be"),
        (("--server", "http://h", "--max-history", "1"), "--max-history must be"),
        (("--server", "http://h", "--max-requests", "0"), "--max-requests must be"),
        (("--server", "http://h", "--seed", "-1"), "--seed must be"),
        (("--server", "http://h", "--speed", "0"), "--speed must be"),
        (("--server", "http://h", "--speed", "fast"), "--speed must be"),
        (("--server", "http://h", "--concurrency", "0"), "--concurrency must be"),
        (("--server", "http://h", "--phases", "0"), "--phases must be"),
        (("--server", "http://h", "--max-tokens", "0"), "--max-tokens must be"),
        (("--server", "http://h", "--timeout", "0"), "--timeout must be"),
        (("--server", "http://h", "--timeout", "soon"), "--timeout must be a number"),
        (("--server", "http://h", "--digits", "0"), "--digits must be"),
        (("--server", "http://h", "--digits", "1", "--vocab-size", "18"), "does not fit"),
        (("--server", "http://h", "--vocab-size", "17"), "too small"),
        (("--server", "http://h", "--json", "/nowhere/report.json"), "--json must be"),
    ],
)
def test_options_that_cannot_be_used(log: Path, options: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        userkv("replay", log, *options)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_log_without_a_request(log: Path) -> None:
    with pytest.raises(InvalidInputFileError, match="gives no request"):
        userkv("replay", log, "--server", "http://h", "--min-history", 500)


def test_log_options_with_a_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text('{"userkv_workload": 1}\n')
    with pytest.raises(InvalidSettingError, match="--every is for logs"):
        userkv("replay", path, "--server", "http://h", "--every", 3)
    with pytest.raises(InvalidInputFileError, match="gives no request"):
        userkv("replay", path, "--server", "http://h")


@pytest.mark.parametrize(
    "options", [("--users", "0"), ("--zipf", "x"), ("--growth", "0"), ("--candidates", "0:1"), ("--max-history", "3")]
)
def test_generator_options_that_cannot_be_used(tmp_path: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSettingError):
        userkv("generate", tmp_path / "w", *options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_here_imports_vllm() -> None:
    code = (
        "import sys, userkv.replay.command, userkv.replay.http_target, userkv.replay.engine_target, "
        "userkv.replay.generator, userkv.replay.cli; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
