"""A circuit breaker: when something keeps failing, stop asking it for a while."""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Lets calls through while they succeed; after failures in a row, only a probe now and then.

    *Closed*: all calls go through. *Open*: none do until a pause is over; then one call is the probe (*half open*). If
    it fails, the next pause is twice as long. Any success closes the breaker, also that of a call that began earlier:
    it is news as fresh as a probe's. Thread-safe.

    Args:
        failures: how many failures in a row open it.
        first_pause: seconds until the first probe.
        max_pause: seconds between probes at most.
        clock: seconds, monotonic.

    Attributes:
        opened: how often it went from closed to open.

    """

    def __init__(
        self,
        failures: int = 2,
        first_pause: float = 0.5,
        max_pause: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.opened = 0
        self._limit = failures
        self._first_pause = first_pause
        self._max_pause = max_pause
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open = False
        self._probing = False
        self._pause = first_pause
        self._next_probe = 0.0

    @property
    def state(self) -> str:
        """``closed``, ``open``, or ``half_open`` while a probe runs."""
        with self._lock:
            return "closed" if not self._open else "half_open" if self._probing else "open"

    def allow(self) -> bool:
        """Whether to make a call now. Who is told so reports its outcome by :meth:`success` or :meth:`failure`.

        A probe that never reports is given up after another pause, and the next caller becomes the probe.
        """
        with self._lock:
            if not self._open:
                return True
            now = self._clock()
            if now < self._next_probe:
                return False
            self._probing = True
            self._next_probe = now + self._pause
            return True

    def success(self) -> None:
        """A call has worked."""
        with self._lock:
            self._failures = 0
            self._open = self._probing = False
            self._pause = self._first_pause

    def failure(self) -> None:
        """A call has failed. Calls that began before the breaker opened and fail now change nothing."""
        with self._lock:
            if not self._open:
                self._failures += 1
                if self._failures < self._limit:
                    return
                self._open = True
                self.opened += 1
            elif self._probing:
                self._pause = min(2 * self._pause, self._max_pause)
            else:
                return
            self._probing = False
            self._next_probe = self._clock() + self._pause
