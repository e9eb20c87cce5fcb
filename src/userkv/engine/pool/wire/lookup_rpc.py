"""``MooncakeLookupServer`` and ``MooncakeLookupClient``: the RPC between the scheduler and each worker, over ZeroMQ.

The scheduler's thread only encodes a call and wakes the client's thread, or looks at an answer that has arrived; it
never waits. The server answers from a few threads of its own, beside the model's forward pass. Sockets are Unix sockets
in a directory that only this user can enter, or TCP on the loopback interface.
"""

import contextlib
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

from userkv.core.errors import InvalidSettingError
from userkv.engine.pool.wire.messages import Call, Failed, Hello, Located, Reply, Saved, ToScheduler

logger = logging.getLogger(__name__)

Callback = Callable[[Reply], None]

PATIENCE = 15.0
"""Seconds until calls fail that no request waits for."""


class MooncakeLookupServer:
    """Answers one scheduler: whoever said :class:`Hello` last gets all replies. Lives in a worker; has threads.

    Args:
        endpoint: ZeroMQ address to listen on; the directory of a Unix socket belongs to the server.
        answer: called from several threads at once.
        threads: calls that are answered at the same time.

    Raises:
        InvalidSettingError: the address cannot be listened on.

    """

    def __init__(self, endpoint: str, answer: Callable[[Call], Reply], threads: int = 4) -> None:
        self.endpoint = endpoint
        self._answer = answer
        self._context = zmq.Context()
        self._socket = _unlimited(self._context.socket(zmq.ROUTER))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise InvalidSettingError(
                f"look-ups cannot listen on {endpoint} ({error.strerror}); choose another lookup_rpc_port, or 0"
            ) from error
        self._outbox: deque[bytes] = deque()
        self._lock = threading.Lock()  # Over the life of the file descriptor below.
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK)
        self._scheduler = b""
        self._accepting = True
        self._stopping = False
        self._decoder = msgspec.msgpack.Decoder(Call)
        self._pool = ThreadPoolExecutor(threads, "MooncakeLookupServer")
        self._thread = threading.Thread(target=self._run, args=(self._wake,), name="MooncakeLookupServer", daemon=True)
        self._thread.start()

    def notify(self, notice: Saved) -> None:
        """Tell the scheduler something that it has not asked for. Any thread; after :meth:`close` nobody hears it."""
        self._send(notice)

    def close(self) -> None:
        """Answer what has been asked, then stop. Idempotent."""
        if not self._accepting:
            return
        self._accepting = False
        self._pool.shutdown(wait=True)
        self._stopping = True
        self._ring()
        self._thread.join()
        with self._lock:
            assert self._wake is not None
            os.close(self._wake)
            self._wake = None
        self._socket.close(linger=100)
        self._context.term()
        if self.endpoint.startswith("ipc://"):
            shutil.rmtree(Path(self.endpoint.removeprefix("ipc://")).parent, ignore_errors=True)

    def _ring(self) -> None:
        with self._lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    def _run(self, wake: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if wake in ready:
                os.eventfd_read(wake)
            while self._scheduler and self._outbox:
                self._socket.send_multipart((self._scheduler, self._outbox.popleft()))
            if self._stopping:
                return
            if self._socket in ready:
                self._receive()

    def _receive(self) -> None:
        sender, *parts = self._socket.recv_multipart()
        try:
            call: Call = self._decoder.decode(b"".join(parts))
        except msgspec.DecodeError as error:
            logger.warning("ignoring a message that is not a call: %s", error)
            return
        if isinstance(call, Hello):
            self._scheduler = sender
            self._send(Located(call.call_id))
        elif self._accepting:
            # Between the question and here close() may have come: then nobody waits for an answer.
            with contextlib.suppress(RuntimeError):
                self._pool.submit(self._reply, call)

    def _reply(self, call: Call) -> None:
        try:
            reply = self._answer(call)
        except Exception as error:  # A fault of ours must not leave the scheduler without an answer.
            logger.exception("answering %s failed in a way that it should not", type(call).__name__)
            reply = Failed(call.call_id, str(error))
        self._send(reply)

    def _send(self, message: ToScheduler) -> None:
        self._outbox.append(msgspec.msgpack.encode(message))
        self._ring()


class MooncakeLookupClient:
    """Calls the servers of all ranks. Lives in the scheduler's process; has one thread, on which callbacks run.

    Calls leave on sockets of their own, so that sending one does not wake the client's thread, which would take the
    interpreter from the caller; replies and notices come to sockets that only that thread uses.

    Args:
        endpoints: a server's address per rank.
        timeout: seconds after which a call counts as failed (a little later, at most a quarter more).
        on_saved: told of each :class:`Saved` notice, with the rank that sent it; on the client's thread.

    """

    def __init__(self, endpoints: Sequence[str], timeout: float, on_saved: Callable[[int, Saved], None]) -> None:
        self.num_ranks = len(endpoints)
        self._timeout = timeout
        self._on_saved = on_saved
        self._context = zmq.Context()
        self._receivers = [self._connect(endpoint) for endpoint in endpoints]
        self._senders = [self._connect(endpoint) for endpoint in endpoints]
        self._ids = itertools.count(1)
        # Each in order of deadlines, since the time-out is the same for all of it.
        self._hasty: dict[int, tuple[float, Callback]] = {}
        self._patient: dict[int, tuple[float, Callback]] = {}
        self._closing = threading.Event()
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToScheduler)
        self._lock = threading.Lock()
        for receiver in self._receivers:
            receiver.send(self._encoder.encode(Hello(0)))
        self._thread = threading.Thread(target=self._run, name="MooncakeLookupClient", daemon=True)
        self._thread.start()

    def call(
        self, rank: int, kind: Callable[..., Call], callback: Callback, *fields: object, patient: bool = False
    ) -> None:
        """Send ``kind(call_id, *fields)`` to a rank; ``callback`` gets the reply, :class:`Failed` after the time-out.

        With ``patient`` that is ``PATIENCE`` seconds: no request waits for the answer.

        Returns at once. Any thread. Callbacks must be quick, and must not raise.
        """
        call_id = next(self._ids)
        with self._lock:
            if not self._closing.is_set():
                pending, timeout = (self._patient, PATIENCE) if patient else (self._hasty, self._timeout)
                pending[call_id] = (time.monotonic() + timeout, callback)
                self._senders[rank].send(self._encoder.encode(kind(call_id, *fields)), zmq.NOBLOCK)
                return
        callback(Failed(call_id, "the client is closed"))

    def close(self) -> None:
        """Stop; calls that have no reply yet fail. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._thread.join()
        for socket in (*self._receivers, *self._senders):
            socket.close(linger=100)
        self._context.term()

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = _unlimited(self._context.socket(zmq.DEALER))
        socket.connect(endpoint)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        for receiver in self._receivers:
            poller.register(receiver, zmq.POLLIN)
        tick = min(max(1, int(self._timeout * 250)), 50)
        while not self._closing.is_set():
            ready = dict(poller.poll(tick))
            for rank, receiver in enumerate(self._receivers):
                if receiver in ready:
                    self._receive(rank, receiver)
            self._give_up(time.monotonic())
        self._give_up(float("inf"))

    def _receive(self, rank: int, receiver: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                message: ToScheduler = self._decoder.decode(receiver.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.DecodeError as error:
                logger.warning("ignoring a message that is no reply: %s", error)
                continue
            if isinstance(message, Saved):
                self._on_saved(rank, message)
                continue
            with self._lock:
                waiting = self._hasty.pop(message.call_id, None) or self._patient.pop(message.call_id, None)
            if waiting is not None:  # Otherwise it came too late, or was our Hello.
                waiting[1](message)

    def _give_up(self, now: float) -> None:
        for pending in (self._hasty, self._patient):
            while True:
                with self._lock:
                    call_id, waiting = next(iter(pending.items()), (0, None))
                    if waiting is None or waiting[0] > now:
                        break
                    del pending[call_id]
                waiting[1](Failed(call_id, "no answer in time"))


def _unlimited(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """Without a limit on queued messages, at which ZeroMQ drops them or blocks; their number is limited elsewhere."""
    socket.set_hwm(0)
    return socket
