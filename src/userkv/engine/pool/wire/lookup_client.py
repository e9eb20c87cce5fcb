"""``MooncakeLookupClient``: the scheduler's end of the RPC between the scheduler and each worker, over ZeroMQ.

The scheduler's thread never waits. It encodes a call and sends it; replies arrive on the client's thread.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq

from userkv.engine.pool.wire.messages import Call, ErrorReply, RegisterCall, Reply, SaveNotice, ToScheduler
from userkv.engine.pool.wire.sockets import without_queue_limit

logger = logging.getLogger(__name__)

Callback = Callable[[Reply], None]

BACKGROUND_TIMEOUT_SECONDS = 15.0
"""Seconds until a call fails that no request waits for."""


class MooncakeLookupClient:
    """Calls the servers of all ranks. Lives in the scheduler's process; has one thread, which runs the callbacks.

    Calls leave on sockets of their own, so that sending one does not wake the client's thread. That thread would take
    the interpreter from the caller. Replies and notices come to sockets that only the client's thread uses.

    Args:
        endpoints: a server's address per rank.
        timeout: seconds after which a call counts as failed (a little later, at most a quarter more).

    """

    def __init__(self, endpoints: Sequence[str], timeout: float) -> None:
        self.num_ranks = len(endpoints)
        self._timeout = timeout
        self._context = zmq.Context()
        self._receivers = [self._connect(endpoint) for endpoint in endpoints]
        self._senders = [self._connect(endpoint) for endpoint in endpoints]
        self._ids = itertools.count(1)
        # Each in order of deadlines, since the time-out is the same for all of its calls.
        self._foreground: dict[int, tuple[float, Callback]] = {}
        self._background: dict[int, tuple[float, Callback]] = {}
        self._closing = threading.Event()
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToScheduler)
        self._lock = threading.Lock()
        for receiver in self._receivers:
            receiver.send(self._encoder.encode(RegisterCall(0)))
        self._thread: threading.Thread | None = None

    def start(self, on_saved: Callable[[int, SaveNotice], None]) -> None:
        """Begin to receive replies and notices. Once; calls may be sent before.

        Args:
            on_saved: called with each :class:`SaveNotice` and the rank that sent it, on the client's thread.

        """
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(on_saved,), name="MooncakeLookupClient", daemon=True)
        self._thread.start()

    def call(
        self, rank: int, kind: Callable[..., Call], callback: Callback, *fields: object, background: bool = False
    ) -> None:
        """Send ``kind(call_id, *fields)`` to a rank; ``callback`` gets the reply.

        After the time-out the reply is an :class:`ErrorReply`.

        With ``background`` the time-out is ``BACKGROUND_TIMEOUT_SECONDS``: no request waits for the reply.

        Returns at once. Any thread. Callbacks must be quick, and must not raise.
        """
        call_id = next(self._ids)
        with self._lock:
            if not self._closing.is_set():
                pending, timeout = (
                    (self._background, BACKGROUND_TIMEOUT_SECONDS) if background else (self._foreground, self._timeout)
                )
                pending[call_id] = (time.monotonic() + timeout, callback)
                self._senders[rank].send(self._encoder.encode(kind(call_id, *fields)), zmq.NOBLOCK)
                return
        callback(ErrorReply(call_id, "the client is closed"))

    def close(self) -> None:
        """Stop; calls that have no reply yet fail. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._expire_calls(float("inf"))
        for socket in (*self._receivers, *self._senders):
            socket.close(linger=100)
        self._context.term()

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = without_queue_limit(self._context.socket(zmq.DEALER))
        socket.connect(endpoint)
        return socket

    def _run(self, on_saved: Callable[[int, SaveNotice], None]) -> None:
        poller = zmq.Poller()
        for receiver in self._receivers:
            poller.register(receiver, zmq.POLLIN)
        tick = min(max(1, int(self._timeout * 250)), 50)
        while not self._closing.is_set():
            ready = dict(poller.poll(tick))
            for rank, receiver in enumerate(self._receivers):
                if receiver in ready:
                    self._receive(receiver, partial(on_saved, rank))
            self._expire_calls(time.monotonic())

    def _receive(self, receiver: "zmq.Socket[bytes]", on_saved: Callable[[SaveNotice], None]) -> None:
        while True:
            try:
                message: ToScheduler = self._decoder.decode(receiver.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.DecodeError as error:
                logger.warning("ignoring a message that is no reply: %s", error)
                continue
            if isinstance(message, SaveNotice):
                on_saved(message)
                continue
            with self._lock:
                waiting = self._foreground.pop(message.call_id, None) or self._background.pop(message.call_id, None)
            if waiting is not None:  # Otherwise it came too late, or answers our RegisterCall.
                waiting[1](message)

    def _expire_calls(self, now: float) -> None:
        for pending in (self._foreground, self._background):
            while True:
                with self._lock:
                    call_id, waiting = next(iter(pending.items()), (0, None))
                    if waiting is None or waiting[0] > now:
                        break
                    del pending[call_id]
                waiting[1](ErrorReply(call_id, "no answer in time"))
