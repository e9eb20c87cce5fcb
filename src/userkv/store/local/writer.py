"""The thread that writes to the SSD what is only in memory, and reads into memory what is used again."""

import threading
from collections import OrderedDict

from userkv.store.local.index import Index, User
from userkv.store.local.ssd_tier import SsdTier
from userkv.store.local.tiers import Tiers

_MOST_PROMOTIONS = 64
"""Users that wait to be read back; with more, the oldest wish is dropped, since nothing depends on it."""


class Writer:
    """Works in the order of the wishes, writing first: what is not written yet is lost in a crash.

    Args:
        index: the users.
        tiers: their objects.
        ssd: their files.
        most_unwritten: bytes that may wait to be written; whoever puts more writes some of them himself.

    """

    def __init__(self, index: Index, tiers: Tiers, ssd: SsdTier, most_unwritten: int) -> None:
        self._index = index
        self._tiers = tiers
        self._ssd = ssd
        self._most_unwritten = most_unwritten
        self._wishes = threading.Condition(threading.Lock())
        self._to_write: OrderedDict[User, None] = OrderedDict()
        self._to_promote: OrderedDict[User, None] = OrderedDict()
        self._working = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="userkv-local-writer", daemon=True)
        self._thread.start()

    @property
    def queued_users(self) -> int:
        """Users that wait to be written or read, or are just being."""
        with self._wishes:
            return len(self._to_write) + len(self._to_promote) + self._working

    def write_soon(self, user: User) -> None:
        """Write a user to the SSD; at once, in this thread, another one if too much is waiting."""
        with self._wishes:
            self._to_write[user] = None
            self._wishes.notify()
            behind = self._index.unwritten > self._most_unwritten
            oldest = self._to_write.popitem(last=False)[0] if behind else None
        if oldest is not None:
            self._write(oldest)

    def promote_soon(self, user: User) -> None:
        """Read a user into memory."""
        with self._wishes:
            self._to_promote[user] = None
            if len(self._to_promote) > _MOST_PROMOTIONS:
                self._to_promote.popitem(last=False)
            self._wishes.notify()

    def close(self, seconds: float) -> bool:
        """Write what is waiting, for at most about so many seconds; ``False`` if that was not enough."""
        with self._wishes:
            self._closed = True
            self._to_promote.clear()
            self._wishes.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wishes:
                self._working = False
                while not (self._to_write or self._to_promote or self._closed):
                    self._wishes.wait()
                if self._to_write:
                    user, work = self._to_write.popitem(last=False)[0], self._write
                elif self._to_promote:
                    user, work = self._to_promote.popitem(last=False)[0], self._promote
                else:
                    return
                self._working = True
            work(user)

    def _write(self, user: User) -> None:
        with self._tiers.holding(user):
            self._ssd.flush(user)

    def _promote(self, user: User) -> None:
        with self._tiers.holding(user):
            self._tiers.promote(user)
