"""Which extents of a user to read, and where their blocks go."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from userkv.records.record import Extent, UserRecord


class ExtentRead(NamedTuple):
    """One extent to read whole.

    Attributes:
        extent: what to read.
        wanted: per block of the extent, the index into the request's list of target blocks; ``None`` for bytes that
            nobody wants: a later extent holds that block, or it is outside the wanted range.

    """

    extent: Extent
    wanted: tuple[int | None, ...]


def plan_load(record: UserRecord, first_block: int, num_blocks: int) -> tuple[ExtentRead, ...]:
    """The extents that fill the blocks ``[first_block, first_block + num_blocks)``, oldest first.

    Every wanted block occurs exactly once; extents that hold none are left out.

    Raises:
        ValueError: the record does not have all of these blocks.

    """
    if first_block < 0 or num_blocks < 0 or first_block + num_blocks > record.num_blocks:
        raise ValueError(
            f"the record has {record.num_blocks} blocks, not blocks {first_block} to {first_block + num_blocks}"
        )
    reads = []
    missing = [(first_block, first_block + num_blocks)] if num_blocks else []
    for extent in reversed(record.extents):
        if not missing:
            break
        wanted: list[int | None] = [None] * extent.num_blocks
        rest = []
        for start, end in missing:
            low, high = max(start, extent.first_block), min(end, extent.end_block)
            if low >= high:
                rest.append((start, end))
                continue
            wanted[low - extent.first_block : high - extent.first_block] = range(low - first_block, high - first_block)
            rest += [piece for piece in ((start, low), (high, end)) if piece[0] < piece[1]]
        if rest != missing:
            reads.append(ExtentRead(extent, tuple(wanted)))
        missing = rest
    return tuple(reversed(reads))


def usable_tokens(record: UserRecord, present: Sequence[bool]) -> int:
    """Tokens of the longest prefix whose blocks all lie in extents that are present.

    An older extent under a missing one is no substitute: what it has of that block is outdated.

    Args:
        record: what should be there.
        present: per extent of the record, whether it is.

    """
    if len(present) != len(record.extents):
        raise ValueError(f"{len(record.extents)} extents, but {len(present)} answers whether they are present")
    missing = ~np.asarray(present, dtype=bool)[record.block_owners()]
    whole = int(missing.argmax()) if missing.any() else record.num_blocks
    return min(whole * record.block_size, len(record.tokens))


def usable_part(record: UserRecord, present: Sequence[bool]) -> UserRecord | None:
    """What a record is worth when some of its extents are gone; ``None`` if nothing.

    It is the base to plan the next save from: a save that is planned from the whole record would never fill the hole.
    """
    usable = usable_tokens(record, present)
    if usable == 0:
        return None
    last_block = -(-usable // record.block_size) - 1
    extents = tuple(
        extent
        for extent, here in zip(record.extents, present, strict=True)
        if here and extent.first_block <= last_block
    )
    return replace(record, tokens=record.tokens[:usable], extents=extents)
