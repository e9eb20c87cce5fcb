"""The user block table: which user's history is in HBM, in which KV blocks.

Blocks are opaque here: the table counts them, compares them by identity, and references them in the block pool while
it holds them. So the same code runs in vLLM's scheduler, in the simulator and under property tests.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from userkv.cache.policies.policy import EvictionPolicy
from userkv.core.errors import IntegrityError
from userkv.core.tokens import TokenArray

K = TypeVar("K", bound=Hashable)

TOKEN_BYTES = 4


class BlockPool(Protocol):
    """What the table needs of the engine's block pool (vLLM's ``BlockPool`` has exactly this).

    Of a block it needs ``ref_cnt``, how many owners reference it.
    """

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add one reference to each block; a free block leaves the free queue."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drop one reference of each block; blocks without any become free, the first ones to be reused first."""


class UserEntry(tuple[Any, ...]):
    """One user's history in HBM. Immutable: a longer history is a new entry, so identity tells entries apart.

    A tuple of the tokens, as bytes, and the blocks: for a million users each object more would take some 50 MB.
    """

    __slots__ = ()

    def __new__(cls, tokens: TokenArray, blocks: Iterable[Any]) -> "UserEntry":
        """An entry of ``tokens``, which are copied, in ``blocks``, each of which the table references once."""
        return super().__new__(cls, (tokens.tobytes(), *blocks))

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The KV blocks that hold the history, in order."""
        return self[1:]

    @property
    def num_blocks(self) -> int:
        """How many blocks hold the history."""
        return len(self) - 1

    @property
    def tokens(self) -> TokenArray:
        """The history; never empty."""
        return np.frombuffer(self[0], np.int32)

    @property
    def num_tokens(self) -> int:
        """Length of the history."""
        return len(self[0]) // TOKEN_BYTES

    def last_page_index(self, block_size: int) -> int:
        """How many tokens of the last block are valid: 1..block_size."""
        return (self.num_tokens - 1) % block_size + 1

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


class UserBlockTable(Generic[K]):
    """Users, their history tokens and their KV blocks; eviction of whole users.

    A user is *busy* between :meth:`acquire` and :meth:`release` (its requests run or wait) and not evicted then.
    Every operation is O(1) in the number of users. Not thread-safe: the scheduler thread owns it.

    Args:
        block_size: tokens per KV block.
        pool: where blocks come from and go to.
        policy: order of eviction; it must be empty and belongs to the table from now on.

    """

    def __init__(self, block_size: int, pool: BlockPool, policy: EvictionPolicy[K]) -> None:
        self.block_size = block_size
        self.user_to_blocks: dict[K, UserEntry] = {}
        self.num_blocks = 0
        self.num_evictable_blocks = 0
        self._pool = pool
        self._policy = policy
        self._busy: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self.user_to_blocks)

    def get(self, user: K) -> UserEntry | None:
        """The user's entry, or ``None``. Does not count as a use."""
        return self.user_to_blocks.get(user)

    def acquire(self, user: K) -> None:
        """A request of this user starts or waits: it is not evicted until :meth:`release`. It may have no entry yet."""
        count = self._busy.get(user, 0)
        self._busy[user] = count + 1
        if count == 0 and user in self._policy:
            self._policy.discard(user)
            self.num_evictable_blocks -= self.user_to_blocks[user].num_blocks

    def release(self, user: K) -> None:
        """A request of this user has ended, or waits no more."""
        count = self._busy[user] - 1
        if count:
            self._busy[user] = count
            return
        del self._busy[user]
        entry = self.user_to_blocks.get(user)
        if entry is not None:
            self._policy.add(user)
            self.num_evictable_blocks += entry.num_blocks

    def count_request(self, user: K, num_tokens: int) -> None:
        """Report to the policy that a request with a history of ``num_tokens`` tokens begins; once per request."""
        self._policy.count_request(user, -(-num_tokens // self.block_size))

    def num_running(self, user: K) -> int:
        """How many requests keep this user busy."""
        return self._busy.get(user, 0)

    def put(self, user: K, tokens: TokenArray, blocks: Sequence[Any]) -> UserEntry:
        """Make ``tokens`` in ``blocks`` the history of a busy user, instead of what was there.

        The table takes its own reference on each block. Blocks that the old entry shares at its head are kept without
        being touched again. O(number of blocks).

        Args:
            user: a user between :meth:`acquire` and :meth:`release`.
            tokens: the history; at least one token.
            blocks: exactly the blocks that hold it.

        Returns:
            The new entry.

        Raises:
            ValueError: the user is not busy, or the blocks do not fit the tokens.

        """
        if user not in self._busy:
            raise ValueError(f"user {user!r} has no running request")
        if len(blocks) != -(-len(tokens) // self.block_size) or not blocks:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks of {self.block_size}")
        return self._replace(user, tokens, blocks)

    def _replace(self, user: K, tokens: TokenArray, blocks: Sequence[Any]) -> UserEntry:
        old = self.user_to_blocks.get(user)
        old_blocks = old.blocks if old is not None else ()
        shared = 0
        for mine, theirs in zip(old_blocks, blocks, strict=False):
            if mine is not theirs:
                break
            shared += 1
        self._pool.touch(blocks[shared:])
        self._pool.free_blocks(reversed(old_blocks[shared:]))
        entry = self.user_to_blocks[user] = UserEntry(tokens, blocks)
        self.num_blocks += len(blocks) - len(old_blocks)
        return entry

    def evict(self, at_most: int) -> int:
        """Take blocks from the user that the policy names: the last ones of its history, or all if it has no more.

        The policy names the same user until it has no blocks left or a request of it starts. What is left of its
        history is a head, worth as much per block as it was before.

        Args:
            at_most: how many blocks, at least 1.

        Returns:
            How many blocks the table released, 0 if no user can be evicted. (A block that a finished request's transfer
            still references becomes free later.)

        """
        user = self._policy.victim()
        if user is None:
            return 0
        held = self.user_to_blocks[user].num_blocks
        if held > at_most:
            return self.shorten(user, (held - at_most) * self.block_size)
        self.drop(user)
        return held

    def busy_users(self) -> list[K]:
        """Users with requests that run or wait, in the order in which they became busy."""
        return list(self._busy)

    def unused_tail(self, user: K, keep: int = 0) -> int:
        """How many of the user's last blocks, beyond the first ``keep``, only the table references.

        A request uses a head of its user's blocks, so the unused blocks are a tail. O(blocks counted).
        """
        entry = self.user_to_blocks.get(user)
        unused = 0
        for block in reversed(entry.blocks[keep:] if entry is not None else ()):
            if block.ref_cnt != 1:
                break
            unused += 1
        return unused

    def shorten(self, user: K, num_tokens: int) -> int:
        """Keep only the first ``num_tokens`` tokens of a user; 0 forgets it.

        Returns:
            How many blocks the table released.

        """
        entry = self.user_to_blocks.get(user)
        if entry is None or num_tokens >= entry.num_tokens:
            return 0
        before = self.num_blocks
        if num_tokens == 0:
            self.drop(user)
        else:
            self._replace(user, entry.tokens[:num_tokens], entry.blocks[: -(-num_tokens // self.block_size)])
        freed = before - self.num_blocks
        if user in self._policy:
            self.num_evictable_blocks -= freed
        return freed

    def drop(self, user: K) -> None:
        """Forget a user and release its blocks, busy or not. Unknown users are ignored."""
        entry = self.user_to_blocks.pop(user, None)
        if entry is None:
            return
        if user in self._policy:
            self._policy.discard(user)
            self.num_evictable_blocks -= entry.num_blocks
        self.num_blocks -= entry.num_blocks
        # The tail first: it is the part that is reused first.
        self._pool.free_blocks(reversed(entry.blocks))

    def clear(self) -> None:
        """Forget all users, busy ones too."""
        for user in list(self.user_to_blocks):
            self.drop(user)

    def check_integrity(self) -> None:
        """Check every invariant of the table; O(everything), for tests.

        Raises:
            IntegrityError: an invariant does not hold.

        """
        seen: set[int] = set()
        evictable = 0
        for user, entry in self.user_to_blocks.items():
            _require(entry.num_tokens > 0, f"{user!r} has an entry without tokens")
            full = (entry.num_blocks - 1) * self.block_size
            last = entry.last_page_index(self.block_size)
            _require(full + last == entry.num_tokens, f"{user!r}: tokens and blocks do not fit together")
            ids = {id(block) for block in entry.blocks}
            _require(len(ids) == entry.num_blocks, f"{user!r} holds a block twice")
            _require(not ids & seen, f"{user!r} shares a block with another user")
            seen |= ids
            _require((user in self._policy) == (user not in self._busy), f"{user!r}: busy and evictable contradict")
            evictable += entry.num_blocks if user in self._policy else 0
        _require(self.num_blocks == len(seen), f"{self.num_blocks} blocks counted, {len(seen)} held")
        _require(self.num_evictable_blocks == evictable, "evictable blocks are miscounted")
        _require(
            len(self._policy) == sum(user not in self._busy for user in self.user_to_blocks),
            "the policy holds users that the table does not",
        )
        _require(all(count > 0 for count in self._busy.values()), "a busy count is not positive")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
