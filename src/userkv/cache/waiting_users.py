"""Users whose requests wait to start: the one part of the future that a scheduler knows."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
U = TypeVar("U", bound=Hashable, contravariant=True)

LIMIT = 64
"""Requests at the head of the queue whose users are spared. Behind a longer queue the cache turns over several times
before a request starts, and to spare all users would be to spare none."""


class Sparing(Protocol[U]):
    """What spares users: the block table."""

    def acquire(self, user: U) -> None:
        """Spare a user; calls nest."""

    def release(self, user: U) -> None:
        """One reason less to spare it."""


class WaitingUsers(Generic[K]):
    """Spares the users of the first requests that wait. All operations are O(1). Not thread-safe.

    Args:
        table: spares them.
        limit: how many requests count.

    """

    def __init__(self, table: Sparing[K], limit: int = LIMIT) -> None:
        self._table = table
        self._limit = limit
        self._spared: dict[str, K] = {}
        # To find the first one in a dict takes longer the more were removed before it.
        self._behind: OrderedDict[str, K] = OrderedDict()

    def arrive(self, request_id: str, user: K) -> None:
        """A request waits from now on, behind all others. One that waits already is ignored."""
        if request_id in self._spared or request_id in self._behind:
            return
        if len(self._spared) < self._limit:
            self._spared[request_id] = user
            self._table.acquire(user)
        else:
            self._behind[request_id] = user

    def leave(self, request_id: str) -> None:
        """A request has started, or will never start. Unknown ones are ignored."""
        self._behind.pop(request_id, None)
        user = self._spared.pop(request_id, None)
        if user is None:
            return
        if self._behind:
            moved, next_user = self._behind.popitem(last=False)
            self._spared[moved] = next_user
            self._table.acquire(next_user)
        self._table.release(user)

    def spared(self) -> list[K]:
        """The spared users, once for each request."""
        return list(self._spared.values())
