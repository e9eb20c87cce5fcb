"""``userkv serve`` as a user runs it."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

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
