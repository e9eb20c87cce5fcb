"""``userkv serve`` as a user meets it: banner, the printed curl line, Ctrl-C."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from userkv.serving.banner import EXAMPLE_HISTORY_LEN, EXAMPLE_PROMPT

pytestmark = pytest.mark.e2e

START_SECONDS = 300
STOP_SECONDS = 60


class Server:
    """A running ``userkv serve``; its output (stdout and stderr together) is read all the time."""

    def __init__(self, home: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "userkv.cli", "serve", "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "USERKV_HOME": str(home)},
            start_new_session=True,  # A group of its own, so that it can be sent Ctrl-C as a terminal does.
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, start: str) -> str:
        """The first line that starts so; fails when the output ends before."""
        deadline = time.monotonic() + START_SECONDS
        while (line := self._queue.get(timeout=deadline - time.monotonic())) is not None:
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"no line starts with {start!r}:\n" + "\n".join(self.lines))

    def interrupt(self) -> int:
        """Press Ctrl-C; returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_SECONDS)

    def rest(self) -> str:
        """What was printed after the last awaited line, up to the end of output."""
        lines = []
        while (line := self._queue.get(timeout=STOP_SECONDS)) is not None:
            lines.append(line)
        return "\n".join(lines)


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


def paste(command: str) -> dict[str, object]:
    done = subprocess.run(["bash", "-c", f"{command} --fail"], capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_serve_answers_and_ends_cleanly(home: Path, servers: list[Server]) -> None:
    server = Server(home, "--max-users", "7", "--kv-cache-gib", "0.25")
    servers.append(server)
    curl = server.wait_for("curl ")
    printed = "\n".join(server.lines)
    assert "serves userkv-demo on http://127.0.0.1:" in printed
    assert str(home / "models") in printed
    assert "at most 7 " in printed
    assert "Traceback" not in printed

    first, second = paste(curl), paste(curl)
    assert first["choices"] == second["choices"]
    for answer, cached in ((first, 0), (second, EXAMPLE_HISTORY_LEN)):
        usage = answer["usage"]
        assert isinstance(usage, dict)
        assert usage["prompt_tokens"] == len(EXAMPLE_PROMPT)
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached

    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2  # Engine and worker at least.
    assert server.interrupt() == 0
    assert server.rest() == "userkv: stopping; running requests may end first"
    assert not psutil.wait_procs(children, timeout=5)[1]

    # Alice is known after a restart: her KV is in the pool's files.
    server = Server(home, "--kv-cache-gib", "0.25")
    servers.append(server)
    again = paste(server.wait_for("curl "))
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == EXAMPLE_HISTORY_LEN
    assert str(home / "pool") in "\n".join(server.lines)
    second_server = Server(home)
    servers.append(second_server)
    second_server.wait_for("userkv: --pool-dir ")
    assert second_server.process.wait(STOP_SECONDS) == 2
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
