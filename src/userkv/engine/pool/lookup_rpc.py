"""``MooncakeLookupServer`` and ``MooncakeLookupClient``: the RPC between the scheduler and each worker, over ZeroMQ.

The scheduler's thread only encodes a call and wakes the client's thread, or looks at an answer that has arrived; it
never waits. The server answers from a few threads of its own, beside the model's forward pass. Sockets are Unix sockets
in a directory that only this user can enter, or TCP on the loopback interface.
"""

import itertools
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq

from userkv.engine.pool.messages import Call, Failed, Hello, Located, Reply, Saved, ToScheduler

logger = logging.getLogger(__name__)

Callback = Callable[[Reply], None]


class MooncakeLookupServer:
    """Answers one scheduler. Lives in a worker; has threads of its own.

    Args:
        endpoint: ZeroMQ address to listen on; the directory of a Unix socket belongs to the server.
        answer: called from several threads at once; must not raise.
        threads: calls that are answered at the same time.

    Raises:
        OSError: the address is taken or cannot be listened on.

    """

    def __init__(self, endpoint: str, answer: Callable[[Call], Reply], threads: int = 4) -> None:
        self.endpoint = endpoint
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._scheduler = b""
        self._notices: deque[bytes] = deque()
        self._closing = False
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Call)
        self._pool = ThreadPoolExecutor(threads, "MooncakeLookupServer")
        self._thread = threading.Thread(target=self._run, name="MooncakeLookupServer", daemon=True)
        self._thread.start()

    def notify(self, notice: Saved) -> None:
        """Tell the scheduler something that it has not asked for. Any thread."""
        self._notices.append(msgspec.msgpack.encode(notice))
        self._ring()

    def close(self) -> None:
        """Answer what has been asked, then stop. Idempotent."""
        if self._closing:
            return
        self._pool.shutdown(wait=True)
        self._closing = True
        self._ring()
        self._thread.join()
        self._socket.close(linger=100)
        self._context.term()
        os.close(self._wake)
        if self.endpoint.startswith("ipc://"):
            shutil.rmtree(Path(self.endpoint.removeprefix("ipc://")).parent, ignore_errors=True)

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._outbox:
                self._socket.send_multipart(self._outbox.popleft())
            while self._scheduler and self._notices:
                self._socket.send_multipart((self._scheduler, self._notices.popleft()))
            if self._closing:
                return
            if self._socket in ready:
                self._receive()

    def _receive(self) -> None:
        sender, data = self._socket.recv_multipart()
        try:
            call: Call = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            logger.warning("ignoring a message that is not a call: %s", error)
            return
        if isinstance(call, Hello):
            self._scheduler = sender
            self._outbox.append((sender, self._encoder.encode(Located(call.call_id))))
            self._ring()
        elif not self._closing:
            self._pool.submit(self._reply, sender, call)

    def _reply(self, sender: bytes, call: Call) -> None:
        self._outbox.append((sender, msgspec.msgpack.encode(self._answer(call))))
        self._ring()


class MooncakeLookupClient:
    """Calls the servers of all ranks. Lives in the scheduler's process; has one thread, on which callbacks run.

    Args:
        endpoints: a server's address per rank.
        timeout: seconds after which a call counts as failed.
        on_saved: told of each :class:`Saved` notice, with the rank that sent it; on the client's thread.

    """

    def __init__(self, endpoints: Sequence[str], timeout: float, on_saved: Callable[[int, Saved], None]) -> None:
        self.num_ranks = len(endpoints)
        self._timeout = timeout
        self._on_saved = on_saved
        self._context = zmq.Context()
        self._sockets = []
        for endpoint in endpoints:
            socket = self._context.socket(zmq.DEALER)
            socket.connect(endpoint)
            self._sockets.append(socket)
        self._ids = itertools.count(1)
        self._outbox: deque[tuple[int, bytes]] = deque()
        # In order of their deadlines: the time-out is the same for all.
        self._pending: dict[int, tuple[float, Callback]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToScheduler)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="MooncakeLookupClient", daemon=True)
        self._thread.start()
        for rank in range(self.num_ranks):
            self.call(rank, Hello, lambda reply: None)

    def call(self, rank: int, kind: Callable[..., Call], callback: Callback, *fields: object) -> None:
        """Send ``kind(call_id, *fields)`` to a rank; ``callback`` gets the reply, :class:`Failed` after the time-out.

        Returns at once. Any thread. Callbacks must be quick, and must not raise.
        """
        call_id = next(self._ids)
        data = msgspec.msgpack.encode(kind(call_id, *fields))
        with self._lock:
            self._pending[call_id] = (time.monotonic() + self._timeout, callback)
            self._outbox.append((rank, data))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop; calls that have no reply yet fail. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for socket in self._sockets:
            socket.close(linger=100)
        self._context.term()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._milliseconds_left()))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._outbox:
                rank, data = self._outbox.popleft()
                self._sockets[rank].send(data)
            for rank, socket in enumerate(self._sockets):
                if socket in ready:
                    self._receive(rank, socket)
            self._give_up(time.monotonic())
        self._give_up(float("inf"))

    def _milliseconds_left(self) -> int | None:
        with self._lock:
            first = next(iter(self._pending.values()), None)
        return None if first is None else int(max(0.0, first[0] - time.monotonic()) * 1000) + 1

    def _receive(self, rank: int, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message: ToScheduler = self._decoder.decode(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Saved):
                self._on_saved(rank, message)
                continue
            with self._lock:
                waiting = self._pending.pop(message.call_id, None)
            if waiting is not None:  # Otherwise it came too late.
                waiting[1](message)

    def _give_up(self, now: float) -> None:
        while True:
            with self._lock:
                call_id, waiting = next(iter(self._pending.items()), (0, None))
                if waiting is None or waiting[0] > now:
                    return
                del self._pending[call_id]
            waiting[1](Failed(call_id, "no answer in time"))
