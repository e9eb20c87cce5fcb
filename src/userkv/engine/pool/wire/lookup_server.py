"""``MooncakeLookupServer``: the worker's end of the RPC between the scheduler and each worker, over ZeroMQ.

A few threads of its own answer the calls while the model computes. The endpoint is a Unix socket in a directory that
only this user can enter, or TCP on the loopback interface.
"""

import contextlib
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq

from userkv.core.errors import InvalidSettingError
from userkv.engine.pool.wire.messages import Call, ErrorReply, LocateReply, RegisterCall, Reply, SaveNotice, ToScheduler
from userkv.engine.pool.wire.sockets import without_queue_limit

logger = logging.getLogger(__name__)


class MooncakeLookupServer:
    """Answers the calls of one scheduler. Lives in a worker; has threads.

    All replies go to the scheduler that sent a :class:`RegisterCall` last.

    Args:
        endpoint: ZeroMQ address to listen on; the directory of a Unix socket belongs to the server.
        handle: answers a call; called from several threads at once.
        threads: how many calls are answered at the same time.

    Raises:
        InvalidSettingError: the address cannot be listened on.

    """

    def __init__(self, endpoint: str, handle: Callable[[Call], Reply], threads: int = 4) -> None:
        self.endpoint = endpoint
        self._handle = handle
        self._context = zmq.Context()
        self._socket = without_queue_limit(self._context.socket(zmq.ROUTER))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise InvalidSettingError(
                f"look-ups cannot listen on {endpoint} ({error.strerror}); choose another lookup_rpc_port, or 0"
            ) from error
        self._outbox: deque[bytes] = deque()
        self._lock = threading.Lock()  # So that no thread uses the file descriptor below after it is closed.
        self._wake_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK)
        self._scheduler = b""
        self._accepting = True
        self._stopping = False
        self._decoder = msgspec.msgpack.Decoder(Call)
        self._pool = ThreadPoolExecutor(threads, "MooncakeLookupServer")
        self._thread = threading.Thread(
            target=self._run, args=(self._wake_fd,), name="MooncakeLookupServer", daemon=True
        )
        self._thread.start()

    def notify(self, notice: SaveNotice) -> None:
        """Send the scheduler a notice. Any thread; after :meth:`close` the notice is lost."""
        self._send(notice)

    def close(self) -> None:
        """Answer the calls that have arrived, then stop. Idempotent."""
        if not self._accepting:
            return
        self._accepting = False
        self._pool.shutdown(wait=True)
        self._stopping = True
        self._wake_thread()
        self._thread.join()
        with self._lock:
            assert self._wake_fd is not None
            os.close(self._wake_fd)
            self._wake_fd = None
        self._socket.close(linger=100)
        self._context.term()
        if self.endpoint.startswith("ipc://"):
            shutil.rmtree(Path(self.endpoint.removeprefix("ipc://")).parent, ignore_errors=True)

    def _wake_thread(self) -> None:
        with self._lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self, wake_fd: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wake_fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if wake_fd in ready:
                os.eventfd_read(wake_fd)
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
        if isinstance(call, RegisterCall):
            self._scheduler = sender
            self._send(LocateReply(call.call_id))
        elif self._accepting:
            # close() may have run since the check. Then the call needs no answer.
            with contextlib.suppress(RuntimeError):
                self._pool.submit(self._reply, call)

    def _reply(self, call: Call) -> None:
        try:
            reply = self._handle(call)
        except Exception as error:  # A bug here must not leave the scheduler without a reply.
            logger.exception("unexpected error while answering %s", type(call).__name__)
            reply = ErrorReply(call.call_id, str(error))
        self._send(reply)

    def _send(self, message: ToScheduler) -> None:
        self._outbox.append(msgspec.msgpack.encode(message))
        self._wake_thread()
