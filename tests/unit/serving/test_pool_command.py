"""``userkv pool`` with a real master on loopback (it starts in a tenth of a second)."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from userkv import cli
from userkv.store.mooncake.config import MooncakeConfig

pytest.importorskip("mooncake", reason="Mooncake is an extra")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "pool"
    yield directory
    cli.main(["pool", "stop", "--dir", str(directory)])


def start(directory: Path, *options: str) -> int:
    return cli.main(["pool", "start", "--port", "0", "--metrics-port", "0", "--dir", str(directory), *options])


def state(directory: Path) -> dict[str, int]:
    return dict(json.loads((directory / "pool.json").read_text()))


def test_start_status_stop(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(directory) == 0
    out = capsys.readouterr().out
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    pid, port, metrics_port = (state(directory)[name] for name in ("pid", "port", "metrics_port"))
    assert f"127.0.0.1:{port}" in out
    assert f"port {metrics_port} can delete everything" in out
    assert str(directory / "mooncake.json") in out

    config = MooncakeConfig.load({}, environ={"MOONCAKE_CONFIG_PATH": str(directory / "mooncake.json")})
    assert config.master_server_address == f"127.0.0.1:{port}"
    assert config.metrics_address == f"127.0.0.1:{metrics_port}"

    assert cli.main(["pool", "status", "--dir", str(directory)]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"pid {pid}\nclients +0\nobjects +0\n", out)

    assert start(directory) == 2
    assert "runs already" in capsys.readouterr().err

    assert cli.main(["pool", "stop", "--dir", str(directory)]) == 0
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not (directory / "mooncake.json").exists()
    capsys.readouterr()
    for command in ("status", "stop"):
        assert cli.main(["pool", command, "--dir", str(directory)]) == 1
        assert "no pool runs" in capsys.readouterr().out


def test_it_listens_on_loopback_only_and_outlives_the_command(directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "userkv.cli",
        "pool",
        "start",
        "--port=0",
        "--metrics-port=0",
        f"--dir={directory}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    process = psutil.Process(state(directory)["pid"])
    assert process.is_running()
    listening = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    assert os.getsid(process.pid) == process.pid


def test_with_files(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(directory, "--ssd", str(tmp_path / "ssd")) == 0
    assert "no working limit" in capsys.readouterr().out
    config = MooncakeConfig.load({}, 1, {"MOONCAKE_CONFIG_PATH": str(directory / "mooncake.json")})
    assert (config.enable_ssd_offload, config.ssd_offload_path) == (True, str(tmp_path / "ssd" / "rank-1"))
    assert "--enable_offload=true" in psutil.Process(state(directory)["pid"]).cmdline()


def test_status_of_a_master_that_hangs(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(directory)
    pid = state(directory)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert cli.main(["pool", "status", "--dir", str(directory)]) == 1
        assert "does not answer" in capsys.readouterr().out
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_master_that_has_ended_is_no_pool(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(directory)
    old = state(directory)
    os.kill(old["pid"], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(old["pid"])], timeout=10)
    assert cli.main(["pool", "status", "--dir", str(directory)]) == 1
    assert start(directory) == 0
    new = state(directory)
    assert new["pid"] != old["pid"]


def test_another_process_with_the_same_pid_is_left_alone(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(directory)
    cli.main(["pool", "stop", "--dir", str(directory)])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        fields = {"host": "127.0.0.1", "port": 1, "metrics_port": 2, "ssd_directory": ""}
        (directory / "pool.json").write_text(json.dumps({"pid": stranger.pid, "started": time.time() - 999} | fields))
        assert cli.main(["pool", "status", "--dir", str(directory)]) == 1
        assert cli.main(["pool", "stop", "--dir", str(directory)]) == 0
        assert "had ended already" in capsys.readouterr().out
        assert stranger.poll() is None
        stranger.kill()


def test_start_says_when_it_serves(directory: Path) -> None:
    start(directory)
    url = f"http://127.0.0.1:{state(directory)['metrics_port']}/health"
    with urllib.request.urlopen(url, timeout=5) as response:
        assert json.load(response)["service_ready"] is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--host", "::1"], "IPv6"),
        (["--port", "99999"], "cannot listen on 127.0.0.1:99999"),
        (["--port", "TAKEN"], "choose another --port"),
        (["--metrics-port", "TAKEN"], "choose another --metrics-port"),
        (["--dir", "/proc/nonexistent"], "cannot be made"),
        (["--dir", ""], "--dir must not be empty"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    directory: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert start(directory, *(port if option == "TAKEN" else option for option in options)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_directory_of_others_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    assert start(directory) == 2
    assert "others can write" in capsys.readouterr().err


def test_a_broken_state_file_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory.mkdir(mode=0o700)
    for content in ("{", "{}", '{"pid": 1}', "[]"):
        (directory / "pool.json").write_text(content)
        assert cli.main(["pool", "status", "--dir", str(directory)]) == 2
        assert "pool.json cannot be read" in capsys.readouterr().err
    (directory / "pool.json").unlink()
