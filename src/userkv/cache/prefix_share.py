"""How many KV blocks ordinary requests' prefixes deserve beside users' histories."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from userkv.core.request import UserKey

LOADED = 0.125
"""What it costs to load a token of a history from the pool, where computing it costs 1."""

STEP = 0.5
"""By how much of what a request has lost the share moves: less than all, since each of the two sides loses by turns."""


MOST_USERS = 1 << 14
"""So many users are remembered at most, the last ones: some megabytes, however many the cache holds."""


class PrefixShare:
    """A share of the KV blocks that moves to those who have lost more of late: ordinary requests, or users' ones.

    vLLM keeps ordinary prefixes in blocks that are free, and users would leave none free: what half of all requests
    begin with would be computed again and again, while users stay who come once an hour. So of either kind it is
    remembered what the whole cache would hold if it were theirs alone: the last requests. Whatever a request has to
    compute although it is remembered was lost to the other kind, and the share moves to its own. The idea is that of
    ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003).

    Prefixes that never come again are never lost, and so win nothing. Not thread-safe: the scheduler's thread owns it.
    A request costs O(its blocks) if it is ordinary, else O(1) amortised.

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
        """Both caches are empty now, through nobody's fault."""
        self._prefixes.clear()
        self._users.clear()
        self._users_blocks = 0

    def fit(self, room: int) -> None:
        """So many blocks are free or users', at present: the rest is with running requests, and can cache nothing."""
        self._room = room
        self._share = min(self._share, float(room))

    def ordinary_request_starts(self, block_hashes: Sequence[Hashable]) -> None:
        """A request without a user starts.

        Args:
            block_hashes: of the blocks that it might have had from the cache and has not, in order.

        """
        lost = 0
        for block_hash in block_hashes:
            if block_hash not in self._prefixes:
                break
            lost += 1
        self._share = min(self._share + STEP * lost, float(self._room))

    def ordinary_request_ends(self, block_hashes: Sequence[Hashable]) -> None:
        """A request without a user leaves what it has computed: ``block_hashes`` of whole blocks, in order."""
        # The end is forgotten before the beginning, which others share.
        for block_hash in reversed(block_hashes):
            self._prefixes[block_hash] = None
            self._prefixes.move_to_end(block_hash)
        while len(self._prefixes) > self._room:
            self._prefixes.popitem(last=False)

    def user_request(self, key: UserKey, history_blocks: int, held_blocks: int, loaded_blocks: int) -> None:
        """A request with a user starts.

        Args:
            key: whose.
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
