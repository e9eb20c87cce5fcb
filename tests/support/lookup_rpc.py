"""Both ends of the lookup RPC, for tests: endpoints, and callbacks that can be waited for."""

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq

from userkv.engine.pool.wire.lookup_client import MooncakeLookupClient
from userkv.engine.pool.wire.lookup_server import MooncakeLookupServer
from userkv.engine.pool.wire.messages import (
    Call,
    CommitCall,
    CommitReply,
    LocateCall,
    LocateReply,
    LookupCall,
    LookupReply,
    RemoveCall,
    Reply,
    SaveNotice,
)

PATIENCE = 10.0
"""Seconds after which a test that waits has failed."""


def ipc_endpoint() -> str:
    """An address in a directory of its own, which the server removes."""
    return f"ipc://{tempfile.mkdtemp(prefix='ukv-')}/rank"


def tcp_endpoint() -> str:
    """An address that is free."""
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
        self.notices: list[tuple[int, SaveNotice]] = []
        self.client = MooncakeLookupClient(endpoints, timeout)
        self.client.start(lambda rank, notice: self.notices.append((rank, notice)))

    def call(self, rank: int, kind: Callable[..., Call], *fields: object) -> Answer:
        """Begin a call."""
        answer = Answer()
        self.client.call(rank, kind, answer, *fields)
        return answer

    def ask(self, rank: int, kind: Callable[..., Call], *fields: object) -> Any:
        """Call and wait for the reply."""
        return self.call(rank, kind, *fields).wait()


ENDPOINTS = {"ipc": ipc_endpoint, "tcp": tcp_endpoint}
EXTENTS = ((2**63 - 1, 0, 3), (7, 3, 1))


def echo(call: Call) -> Reply:
    """A reply of the right kind that repeats what was asked."""
    match call:
        case LookupCall():
            return LookupReply(call.call_id, f"{call.uid} {call.namespace}".encode(), ("dram", ""))
        case CommitCall():
            return CommitReply(call.call_id, True, call.base_generation + 1, EXTENTS, f"{len(call.record)} bytes")
        case LocateCall() | RemoveCall():
            return LocateReply(call.call_id, tuple(str(extent[0]) for extent in call.extents))
        case _:
            return LocateReply(call.call_id)


class Ends:
    """Servers and callers on one kind of endpoint, closed at the end."""

    def __init__(self, kind: str) -> None:
        self.endpoint = ENDPOINTS[kind]()
        self.kind = kind
        self.stack = ExitStack()

    def serve(
        self, answer: Callable[[Call], Reply] = echo, endpoint: str | None = None, threads: int = 4
    ) -> MooncakeLookupServer:
        server = MooncakeLookupServer(endpoint or self.endpoint, answer, threads)
        self.stack.callback(server.close)
        return server

    def caller(self, *endpoints: str, timeout: float = 5.0) -> Caller:
        caller = Caller(*(endpoints or (self.endpoint,)), timeout=timeout)
        self.stack.callback(caller.client.close)
        return caller

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """A stranger's socket, connected to the endpoint."""
        context = zmq.Context()
        socket = context.socket(kind)
        socket.linger = 100
        self.stack.callback(context.term)
        self.stack.callback(socket.close)
        socket.connect(self.endpoint)
        return socket
