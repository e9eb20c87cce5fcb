"""How many KV blocks ordinary requests' prefixes deserve beside users' histories."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from userkv.core.request import UserKey

LOADED = 0.125
"""Cost of loading a token of a history from the pool, where computing it costs 1."""

STEP = 0.5
"""The share moves by this fraction of what a request has lost. Less than 1, since the two sides lose by turns."""

MOST_USERS = 1 << 14
"""How many users are remembered at most, the last ones: some megabytes, however many the cache holds."""


class PrefixShare:
    """A share of the KV blocks that moves to the kind of requests that lost more lately: ordinary ones, or users'.

    vLLM keeps ordinary prefixes in free blocks, and users would leave none free. A prefix of half of all requests would
    be computed again and again, while users stay that come once an hour. So the share remembers, for either kind, what
    the whole cache would hold if it were for that kind alone: its last requests. What a request has to compute although
    it is remembered was lost to the other kind, and the share moves to its own. The idea is that of ARC (Megiddo and
    Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003).

    Prefixes that never come again are never lost, and so win nothing. Not thread-safe: the scheduler's thread owns it.
    An ordinary request costs O(its blocks), a user's request O(1) amortised.

    Args:
        num_blocks: KV blocks that requests and users share.
        max_users: users held at most; 0 = no limit.

    """

    def __init__(self, num_blocks: int, max_users: int = 0) -> None:
        self._room = num_blocks
        self._most_users = min(max_users or MOST_USERS, MOST_USERS)
        self._share = 0.0
        self._prefixes: OrderedDict[Hashable, None] = OrderedDict()
        self._users: OrderedDict[UserKey, int] = OrderedDict()
        self._users_blocks = 0

    @property
    def blocks(self) -> int:
        """How many blocks should be free of users, for the prefixes of ordinary requests."""
        return int(self._share)

    def forget(self) -> None:
        """Both caches were reset, so neither kind has lost anything to the other."""
        self._prefixes.clear()
        self._users.clear()
        self._users_blocks = 0

    def set_room(self, room: int) -> None:
        """Set how many blocks are free or users' now. Running requests have the rest, which can cache nothing."""
        self._room = room
        self._share = min(self._share, float(room))

    def count_ordinary_start(self, block_hashes: Sequence[Hashable]) -> None:
        """A request without a user starts.

        Args:
            block_hashes: hashes of the blocks that the cache could have held and did not, in order.

        """
        lost = 0
        for block_hash in block_hashes:
            if block_hash not in self._prefixes:
                break
            lost += 1
        self._share = min(self._share + STEP * lost, float(self._room))

    def count_ordinary_end(self, block_hashes: Sequence[Hashable]) -> None:
        """A request without a user ends; its whole blocks, with these hashes in order, stay in the cache.

        The end of a prefix is forgotten before its beginning, which other requests share.
        """
        for block_hash in reversed(block_hashes):
            self._prefixes[block_hash] = None
            self._prefixes.move_to_end(block_hash)
        while len(self._prefixes) > self._room:
            self._prefixes.popitem(last=False)

    def count_user_request(self, key: UserKey, history_blocks: int, held_blocks: int, loaded_blocks: int) -> None:
        """A request with a user starts.

        Args:
            key: the user.
            history_blocks: how many blocks its history takes.
            held_blocks: how many blocks HBM has of the user, whether they are of this history or of another one.
            loaded_blocks: how many blocks come from the pool.

        """
        known = self._users.pop(key, 0)
        self._users_blocks += history_blocks - known
        self._users[key] = history_blocks
        while self._users_blocks > self._room or len(self._users) > self._most_users:
            self._users_blocks -= self._users.popitem(last=False)[1]
        missing = max(0, min(known, history_blocks) - held_blocks)
        loaded = min(missing, loaded_blocks)
        self._share = max(0.0, self._share - STEP * (missing - loaded + LOADED * loaded))
