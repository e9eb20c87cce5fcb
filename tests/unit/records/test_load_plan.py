"""Load plans: every wanted block from the extent that holds it, and what is left when extents are gone.

That loads get the newest bytes after any saves is in ``test_save_plan.py``.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.tokens import as_tokens
from userkv.records.load_plan import ExtentRead, plan_load, usable_part, usable_tokens
from userkv.records.record import Extent, UserRecord

OLD, MIDDLE, LAST, LATE = Extent(1, 0, 4), Extent(2, 1, 1), Extent(3, 4, 2), Extent(4, 3, 2)
RECORD = UserRecord(5, as_tokens(range(11)), 2, (OLD, MIDDLE, LAST, LATE), "w", 1.0)
"""Blocks 0 and 2 lie in OLD, 1 in MIDDLE, 3 and 4 in LATE, 5 (half full) in LAST."""


def test_every_wanted_block_once() -> None:
    assert plan_load(RECORD, 0, 6) == (
        ExtentRead(OLD, (0, None, 2, None)),
        ExtentRead(MIDDLE, (1,)),
        ExtentRead(LAST, (None, 5)),
        ExtentRead(LATE, (3, 4)),
    )


def test_extents_that_hold_nothing_wanted_are_left_out() -> None:
    assert plan_load(RECORD, 2, 2) == (ExtentRead(OLD, (None, None, 0, None)), ExtentRead(LATE, (1, None)))
    assert plan_load(RECORD, 6, 0) == ()


def test_what_lies_beyond_the_end_is_not_wanted() -> None:
    record = UserRecord(1, as_tokens([1, 2, 3]), 2, (Extent(1, 0, 9),), "w", 1.0)
    assert plan_load(record, 1, 1) == (ExtentRead(record.extents[0], (None, 0, *[None] * 7)),)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 7), (5, 2), (3, -1)])
def test_blocks_that_do_not_exist(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="the record has 6 blocks"):
        plan_load(RECORD, first, count)


@pytest.mark.parametrize(
    ("missing", "tokens"), [((), 11), ((LAST,), 10), ((LATE,), 6), ((MIDDLE,), 2), ((OLD, LATE), 0)]
)
def test_usable_tokens(missing: tuple[Extent, ...], tokens: int) -> None:
    present = [extent not in missing for extent in RECORD.extents]
    assert usable_tokens(RECORD, present) == tokens
    part = usable_part(RECORD, present)
    if part is None:
        assert tokens == 0
    else:
        assert part.tokens.tolist() == list(range(tokens))
        assert part.generation == RECORD.generation
        assert not set(part.extents) & set(missing)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=6), st.integers(1, 20), st.data())
def test_what_is_left_is_loaded_from_where_it_was(
    spans: list[tuple[int, int]], num_tokens: int, data: st.DataObject
) -> None:
    num_blocks = -(-num_tokens // 2)
    spans = [(0, num_blocks), *[span for span in spans if span[0] < num_blocks]]
    extents = tuple(Extent(number, *span) for number, span in enumerate(spans))
    record = UserRecord(1, as_tokens(range(num_tokens)), 2, extents, "w", 1.0)
    present = data.draw(st.lists(st.booleans(), min_size=len(extents), max_size=len(extents)))
    usable = usable_tokens(record, present)
    holders = [max(e.extent_id for e in extents if e.first_block <= block < e.end_block) for block in range(num_blocks)]
    intact = next((block for block in range(num_blocks) if not present[holders[block]]), num_blocks)
    assert usable == min(2 * intact, num_tokens)
    part = usable_part(record, present)
    assert (part is None) == (intact == 0)
    if part is not None:
        assert sources(part) == sources(record)[:intact]
        assert usable_tokens(part, [True] * len(part.extents)) == usable


def sources(record: UserRecord) -> list[Extent]:
    """Which extent each block is loaded from."""
    found = {
        index: read.extent
        for read in plan_load(record, 0, record.num_blocks)
        for index in read.wanted
        if index is not None
    }
    return [found[index] for index in range(record.num_blocks)]


def test_a_tombstone_has_nothing() -> None:
    tombstone = UserRecord.tombstone(1, "w", 1.0)
    assert plan_load(tombstone, 0, 0) == ()
    assert usable_tokens(tombstone, []) == 0
    assert usable_part(tombstone, []) is None


def test_as_many_answers_as_extents() -> None:
    with pytest.raises(ValueError, match="4 extents, but 3 answers"):
        usable_tokens(RECORD, [True] * 3)
