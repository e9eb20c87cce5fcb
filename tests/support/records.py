"""User records for tests that need one and do not care how it came to be."""

import itertools
from collections.abc import Sequence
from typing import Any

from userkv.core.tokens import as_tokens
from userkv.engine.pool.scheduler.pool_client import PoolLookupResult
from userkv.records.load_plan import usable_part
from userkv.records.record import Extent, UserRecord
from userkv.records.save_plan import plan_save
from userkv.store.backend import Tier

BLOCK = 4
"""Tokens per block."""


def record_of(tokens: Sequence[int], generation: int = 1, max_extent_blocks: int = 2, **fields: Any) -> UserRecord:
    """A record of a history in extents of ``max_extent_blocks`` blocks."""
    first = itertools.count(1000 * generation)
    plan = plan_save(
        None,
        as_tokens(tokens),
        BLOCK,
        max_extent_blocks=max_extent_blocks,
        new_id=lambda: next(first),
        writer="w",
        now=1.0,
    )
    assert plan is not None
    values = {name: getattr(plan.record, name) for name in ("tokens", "block_size", "extents", "writer", "written_at")}
    return UserRecord(generation, **(values | fields))


def answer_of(
    record: UserRecord | None, present: Sequence[bool] | None = None, tier: Tier = Tier.DRAM
) -> PoolLookupResult:
    """What the pool says of a user who has this record; ``present``: which of its extents are still there."""
    if record is None or record.deleted:
        return PoolLookupResult(True, record)
    usable = usable_part(record, [True] * len(record.extents) if present is None else present)
    return PoolLookupResult(True, record, usable, tier if usable is not None else None)


def extent_ids(extents: Sequence[Extent]) -> list[int]:
    """Their ids."""
    return [extent.extent_id for extent in extents]
