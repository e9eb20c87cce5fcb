"""Both ends of the lookup RPC, for tests: endpoints, and callbacks that can be waited for."""

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from userkv.engine.pool.lookup_rpc import MooncakeLookupClient
from userkv.engine.pool.messages import Call, Reply, Saved

PATIENCE = 10.0
"""Seconds after which a test that waits has failed."""


def ipc_endpoint() -> str:
    """An address in a directory of its own, which the server removes."""
    return f"ipc://{tempfile.mkdtemp(prefix='ukv-')}/rank"


def tcp_endpoint() -> str:
    """An address that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until something holds, or fail."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


class Answer:
    """A callback that remembers what it was given: exactly one reply, sooner or later."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self._arrived = threading.Event()

    def __call__(self, reply: Reply) -> None:
        self.replies.append(reply)
        self._arrived.set()

    def wait(self, seconds: float = PATIENCE) -> Any:
        """The reply."""
        assert self._arrived.wait(seconds), "there was no reply"
        return self.replies[0]


class Caller:
    """A client that keeps the notices it gets."""

    def __init__(self, *endpoints: str, timeout: float = 5.0) -> None:
        self.notices: list[tuple[int, Saved]] = []
        self.client = MooncakeLookupClient(endpoints, timeout, lambda rank, notice: self.notices.append((rank, notice)))

    def call(self, rank: int, kind: Callable[..., Call], *fields: object) -> Answer:
        """Begin a call."""
        answer = Answer()
        self.client.call(rank, kind, answer, *fields)
        return answer

    def ask(self, rank: int, kind: Callable[..., Call], *fields: object) -> Any:
        """Call and wait for the reply."""
        return self.call(rank, kind, *fields).wait()
