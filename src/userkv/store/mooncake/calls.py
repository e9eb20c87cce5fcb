"""Calls into the library that must not be waited for longer than so.

A call to a master that is gone takes Mooncake 4.3 s (three attempts to connect, a second apart; nothing shortens
that), and one to a frozen process 30 s in some modes. So calls run on threads of their own, and callers leave when
their time is over. The call itself goes on until the library returns; then its thread is free again.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import TypeVar

from userkv.store.backend import PoolUnavailableError

T = TypeVar("T")


class TimedCalls:
    """Runs calls with a deadline on a fixed number of threads. Thread-safe.

    Args:
        name: of the threads.
        threads: calls at once; with all of them stuck, further calls fail when their own time is over.

    """

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threading.Semaphore(threads)

    def run(self, call: Callable[[], T], seconds: float, what: str) -> T:
        """The result of ``call``.

        What ``call`` works on must stay usable after the deadline, since it may still run.

        Raises:
            PoolUnavailableError: it did not return within ``seconds``.
            Exception: whatever it raises.

        """
        if not self._idle.acquire(timeout=seconds):
            raise PoolUnavailableError(f"{what}: earlier calls to Mooncake are stuck")
        try:
            future = self._executor.submit(call)
        except RuntimeError as error:
            self._idle.release()
            raise PoolUnavailableError(f"{what}: the pool is closed") from error
        future.add_done_callback(self._release)
        try:
            return future.result(seconds)
        except FutureTimeoutError as error:
            raise PoolUnavailableError(f"{what}: no answer from Mooncake within {seconds:g} s") from error

    def close(self) -> None:
        """Accept no further calls; those that run go on."""
        self._executor.shutdown(wait=False)

    def _release(self, future: Future[T]) -> None:
        self._idle.release()


class Gate:
    """Counts who is inside, and lets nobody in once it is closed. Thread-safe."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._left = threading.Condition()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be inside for a ``with`` block.

        Raises:
            PoolUnavailableError: the gate is closed.

        """
        with self._left:
            if self._closed:
                raise PoolUnavailableError("the pool is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    def close(self, seconds: float) -> bool:
        """Close it and wait until everybody has left.

        Returns:
            Whether they have, within ``seconds``.

        """
        with self._left:
            self._closed = True
            return self._left.wait_for(lambda: not self._inside, seconds)
