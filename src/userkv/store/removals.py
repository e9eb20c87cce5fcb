"""Objects that should go and are still there: somebody reads them (a lease), or the pool did not answer."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from userkv.store.backend import PoolBackend, PoolUnavailableError

FIRST_PAUSE = 1.0
MAX_PAUSE = 30.0
"""Seconds between tries; read leases last 10 s."""


class _Try(NamedTuple):
    due: float
    pause: float


class PendingRemovals:
    """Removes objects, and remembers those that did not go to try them again. Thread-safe.

    Args:
        backend: where the objects are.
        clock: seconds, monotonic.
        limit: objects remembered at most; beyond it the oldest are left to the pool's own eviction.

    Attributes:
        dropped: objects that were forgotten because of the limit.

    """

    def __init__(self, backend: PoolBackend, clock: Callable[[], float], limit: int = 10_000) -> None:
        self.dropped = 0
        self._backend = backend
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], _Try] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def of_user(self, user: str) -> list[str]:
        """The keys that still have to go of one user."""
        with self._lock:
            return [key for owner, key in self._pending if owner == user]

    def remove(self, user: str, keys: Sequence[str], *, verify: bool = False) -> list[str]:
        """Remove objects.

        Args:
            user: whose they are.
            keys: which.
            verify: ask the pool afterwards whether those that it calls removed are gone. (Not the others: to ask for
                an object may keep it alive.)

        Returns:
            Those that are not known to be gone; :meth:`sweep` tries them again.

        """
        if not keys:
            return []
        try:
            left = set(self._backend.remove(user, keys))
            gone = [key for key in keys if key not in left]
            if verify and gone:
                tiers = self._backend.locate(user, gone)
                left.update(key for key, tier in zip(gone, tiers, strict=True) if tier is not None)
        except PoolUnavailableError:
            left = set(keys)
        self._note(user, keys, left)
        return [key for key in keys if key in left]

    def sweep(self) -> int:
        """Try again what is due; stops at the first sign that the pool does not answer.

        Returns:
            How many objects still have to go.

        """
        now = self._clock()
        due: defaultdict[str, list[str]] = defaultdict(list)
        with self._lock:
            for (user, key), attempt in self._pending.items():
                if attempt.due <= now:
                    due[user].append(key)
        for user, keys in due.items():
            try:
                self._note(user, keys, set(self._backend.remove(user, keys)))
            except PoolUnavailableError:
                break
        return len(self._pending)

    def _note(self, user: str, keys: Sequence[str], left: set[str]) -> None:
        now = self._clock()
        with self._lock:
            for key in keys:
                before = self._pending.pop((user, key), None)
                if key in left:
                    pause = FIRST_PAUSE if before is None else min(2 * before.pause, MAX_PAUSE)
                    self._pending[user, key] = _Try(now + pause, pause)
            while len(self._pending) > self._limit:
                del self._pending[next(iter(self._pending))]
                self.dropped += 1
