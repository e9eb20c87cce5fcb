"""Least recently used: the user without a request for the longest time is evicted first."""

from collections import OrderedDict

from userkv.cache.policies.policy import EvictionPolicy, K


class UserKVLRUManager(EvictionPolicy[K]):
    """Evicts the user whose last request ended longest ago. Every operation is O(1)."""

    # An OrderedDict, not a dict: taking the first key of a dict again and again scans the holes that deletions leave.
    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def add(self, user: K) -> None:
        if user in self._order:
            raise ValueError(f"user {user!r} is evictable already")
        self._order[user] = None

    def discard(self, user: K) -> None:
        self._order.pop(user, None)

    def victim(self) -> K | None:
        return next(iter(self._order), None)

    def clear(self) -> None:
        self._order.clear()

    def __contains__(self, user: object) -> bool:
        return user in self._order

    def __len__(self) -> int:
        return len(self._order)
