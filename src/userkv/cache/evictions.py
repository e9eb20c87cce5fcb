"""Which blocks users lose when a request needs them. The victim is chosen by the policy, see ``policies/``."""

from collections.abc import Mapping

from userkv.cache.block_table import UserBlockTable
from userkv.cache.stats import UserCacheStats
from userkv.core.request import UserKey


class Evictions:
    """Takes blocks from users. Not thread-safe: the scheduler thread owns it.

    Args:
        table: the users.
        stats: counts evictions.
        max_users: how many users the table may hold; 0 = no limit.
        whole_users: take all blocks of a victim, instead of no more of its tail than is needed.

    """

    def __init__(
        self, table: UserBlockTable[UserKey], stats: UserCacheStats, max_users: int, whole_users: bool = False
    ) -> None:
        self._table = table
        self._stats = stats
        self._max_users = max_users
        self._whole_users = whole_users

    def evict_idle(self, at_most: int) -> int:
        """Take blocks from the user that the policy names. Returns how many; 0 if no user is idle."""
        users = len(self._table)
        whole = max(at_most, self._table.num_blocks) if self._whole_users else at_most
        blocks = self._table.evict(whole)
        self._stats.lru_evictions += users - len(self._table)
        self._stats.evicted_blocks += blocks
        return blocks

    def evict_until(self, missing: int) -> int:
        """Evict idle users until ``missing`` blocks were released, or no user is idle. Returns how many blocks were."""
        freed = 0
        while freed < missing and (blocks := self.evict_idle(missing - freed)):
            freed += blocks
        return freed

    def evict_to_limit(self) -> None:
        """Evict idle users while the table holds more than ``max_users``."""
        while self._max_users and len(self._table) > self._max_users and self.evict_idle(self._table.num_blocks):
            pass

    def make_room(self, missing: int, wanted: Mapping[UserKey, int]) -> int:
        """Release ``missing`` blocks: first idle users', then tails of busy users that no request of theirs uses.

        Busy users lose their tails in the order in which their requests came, the last one first. None loses anything
        if all of it together would not be enough: then the request has to wait for others to end.

        Args:
            missing: how many blocks.
            wanted: how many of its first blocks a user keeps, because the request that asks wants to hit them.

        Returns:
            How many blocks the table released.

        """
        tails: dict[UserKey, int] = {}
        if self._table.num_evictable_blocks < missing:
            for user in reversed(self._table.busy_users()):
                tails[user] = self._table.unused_tail(user, wanted.get(user, 0))
            if self._table.num_evictable_blocks + sum(tails.values()) < missing:
                return 0
        freed = self.evict_until(missing)
        for user, tail in tails.items():
            entry = self._table.get(user)
            if freed < missing and tail and entry is not None:
                freed += self._table.shorten(user, (entry.num_blocks - tail) * self._table.block_size)
        return freed
