"""``userkv serve`` as a user meets it: banner, the printed curl line, Ctrl-C."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.examples import run_example
from tests.support.server import START_SECONDS, STOP_SECONDS, Server
from userkv.serving.banner import EXAMPLE_HISTORY_ITEMS, EXAMPLE_HISTORY_LEN

pytestmark = pytest.mark.e2e

EXAMPLE_HISTORY_TOKENS = 2 * EXAMPLE_HISTORY_ITEMS


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("userkv-home")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)


def paste(command: str) -> dict[str, Any]:
    done = subprocess.run(["bash", "-c", f"{command} --fail"], capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_serve_answers_and_ends_cleanly(home: Path, servers: list[Server]) -> None:
    server = Server(home, "--max-users", "7", "--kv-cache-gib", "0.25")
    servers.append(server)
    curl = server.wait_for("curl ")
    printed = "\n".join(server.lines)
    assert "serves userkv-demo-ranker on http://127.0.0.1:" in printed
    assert str(home / "models") in printed
    assert "at most 7 " in printed
    assert "Traceback" not in printed

    first, second = paste(curl), paste(curl)
    assert first["ranking"] == second["ranking"]
    for answer, cached in ((first, 0), (second, EXAMPLE_HISTORY_TOKENS)):
        assert answer["usage"]["history_tokens"] == EXAMPLE_HISTORY_TOKENS
        assert answer["usage"]["cached_tokens"]["total"] == cached

    address = next(line for line in server.lines if "serves userkv-demo-ranker on" in line).split(" on ")[1].split()[0]
    said = run_example("rank_client.py", address)
    assert said.count("12 of 12 tokens cached") == 2

    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2  # Engine and worker at least.
    assert server.interrupt() == 0
    assert server.rest() == "userkv: stopping; running requests may end first"
    assert not psutil.wait_procs(children, timeout=5)[1]

    # Alice is known after a restart: the KV is in the pool's files.
    server = Server(home, "--kv-cache-gib", "0.25")
    servers.append(server)
    again = paste(server.wait_for("curl "))
    assert again["ranking"] == first["ranking"]
    assert again["usage"]["cached_tokens"]["ssd"] == EXAMPLE_HISTORY_TOKENS
    assert str(home / "pool") in "\n".join(server.lines)
    second_server = Server(home)
    servers.append(second_server)
    second_server.wait_for("userkv: --pool-dir ")
    assert second_server.process.wait(STOP_SECONDS) == 2
    assert server.interrupt() == 0


def test_a_decoder_is_served_with_completions(home: Path, servers: list[Server]) -> None:
    server = Server(home, "--model", "userkv-demo", "--kv-cache-gib", "0.25")
    servers.append(server)
    curl = server.wait_for("curl ")
    for cached in (0, EXAMPLE_HISTORY_LEN):
        assert paste(curl)["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert server.interrupt() == 0


def test_ctrl_c_while_starting(home: Path, servers: list[Server]) -> None:
    server = Server(home)
    servers.append(server)
    server.wait_for("userkv: starting vLLM")
    deadline = time.monotonic() + START_SECONDS
    me = psutil.Process(server.process.pid)
    while not (
        children := [child for child in me.children(recursive=True) if "tracker import" not in str(child.cmdline())]
    ):
        assert server.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.interrupt() == 0
    assert "Traceback" not in server.rest()
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-model-len", "99999"), "vLLM did not start: "),
        (("--no-such-option",), "vLLM refuses the options: "),
        (("--no-enable-prefix-caching",), "KV_MANAGER_FOR_GR cannot be used here: prefix caching is off"),
    ],
)
def test_what_vllm_refuses_is_one_line(
    home: Path, servers: list[Server], options: tuple[str, ...], message: str
) -> None:
    server = Server(home, *options)
    servers.append(server)
    server.wait_for(f"userkv: {message}")
    assert server.process.wait(STOP_SECONDS) == 2
    assert server.rest() == ""
    assert "Traceback" not in "\n".join(server.lines)
