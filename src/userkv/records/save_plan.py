"""What to write when a user's history has grown or changed, and the record to commit afterwards."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from userkv.core.tokens import TokenArray, common_prefix
from userkv.records.record import MAX_EXTENT_BLOCKS, Extent, UserRecord


@dataclass(frozen=True)
class SavePlan:
    """A save of one user, the same for all workers.

    Attributes:
        new_extents: what to write, in order; together they are the record's blocks from the first one's on.
        record: what to commit when all workers have written them.
        dropped: extents of the base that the record no longer names.

    """

    new_extents: tuple[Extent, ...]
    record: UserRecord
    dropped: tuple[Extent, ...]


def plan_save(
    base: UserRecord | None,
    tokens: TokenArray,
    block_size: int,
    *,
    max_extent_blocks: int,
    new_id: Callable[[], int],
    writer: str,
    now: float,
    ttl_seconds: float = 0,
    max_small_extents: int = 8,
) -> SavePlan | None:
    """Plan how the pool comes to hold ``tokens``; ``None`` if it does already (or there are none).

    Blocks that the base holds entirely stay where they are. Everything from the first block that differs on is
    written, the base's last, partial block included: the new extent overrides it. If that would leave more than
    ``max_small_extents`` extents that supply less than half of ``max_extent_blocks`` each, the write starts earlier
    and replaces them all. So a user has at most that many extents, and two per ``max_extent_blocks`` of history.

    Args:
        base: the user's record, shortened to what is still there (:func:`userkv.records.load_plan.usable_part`). A
            tombstone, an expired record and one of another block size hold nothing, but their generation counts.
        tokens: the history, read-only.
        block_size: tokens per block.
        max_extent_blocks: blocks of a new extent at most.
        new_id: a fresh extent id.
        writer: who saves, for operators.
        now: unix seconds.
        ttl_seconds: how long the record lives; 0 = for ever.
        max_small_extents: small extents of a user that are put up with, at least 1.

    """
    if not tokens.size:
        return None
    kept: tuple[Extent, ...] = ()
    first_dirty = 0
    if base is not None and not base.deleted and not base.expired(now) and base.block_size == block_size:
        common = common_prefix(base.tokens, tokens)
        if common == len(tokens):
            return None
        first_dirty, kept = _keep(base, common // block_size, max_extent_blocks, max_small_extents)
    num_blocks = -(-len(tokens) // block_size)
    size = min(max_extent_blocks, MAX_EXTENT_BLOCKS)
    new_extents = tuple(
        Extent(new_id(), first, min(size, num_blocks - first)) for first in range(first_dirty, num_blocks, size)
    )
    record = UserRecord(
        generation=1 if base is None else base.generation + 1,
        tokens=tokens,
        block_size=block_size,
        extents=kept + new_extents,
        writer=writer,
        written_at=now,
        expires_at=now + ttl_seconds if ttl_seconds > 0 else 0.0,
    )
    named = set(kept)
    dropped = () if base is None else tuple(extent for extent in base.extents if extent not in named)
    return SavePlan(new_extents, record, dropped)


def _keep(
    base: UserRecord, first_dirty: int, max_extent_blocks: int, max_small_extents: int
) -> tuple[int, tuple[Extent, ...]]:
    """From which block on to write, at most ``first_dirty``, and the extents that supply the blocks before it."""
    owners = base.block_owners()
    while True:
        supplied = np.bincount(owners[:first_dirty], minlength=len(base.extents))
        small = (supplied > 0) & (supplied * 2 < max_extent_blocks)
        # The last new extent may be small as well.
        if np.count_nonzero(small) < max(1, max_small_extents):
            return first_dirty, tuple(base.extents[index] for index in np.flatnonzero(supplied))
        # Whole extents around the small ones supply less from now on and may become small themselves: look again.
        first_dirty = int(small[owners[:first_dirty]].argmax())
