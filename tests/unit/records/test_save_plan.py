"""Saves planned over random histories, on a model of which bytes lie where: loads always get the newest ones.

The bytes of a block are modelled as all tokens up to its end, since KV depends on everything before it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userkv.core.tokens import as_tokens, common_prefix
from userkv.records.load_plan import plan_load, usable_part
from userkv.records.record import MAX_EXTENT_BLOCKS, Extent, UserRecord
from userkv.records.save_plan import SavePlan, plan_save

Bytes = tuple[int, ...]


@dataclass
class Disk:
    """What is in the pool of one user, and the saves that put it there."""

    block_size: int = 2
    max_extent_blocks: int = 4
    max_small_extents: int = 3
    record: UserRecord | None = None
    extents: dict[Extent, list[Bytes]] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=itertools.count)

    def plan(self, history: list[int], base: UserRecord | None = None, **options: object) -> SavePlan | None:
        arguments = {
            "max_extent_blocks": self.max_extent_blocks,
            "new_id": lambda: next(self.ids),
            "writer": "w",
            "now": 100.0,
            "max_small_extents": self.max_small_extents,
        }
        return plan_save(base, as_tokens(history), self.block_size, **arguments | options)  # type: ignore[arg-type]

    def save(self, history: list[int]) -> SavePlan | None:
        plan = self.plan(history, self.record)
        if plan is not None:
            for extent in plan.new_extents:
                blocks = range(extent.first_block, extent.end_block)
                self.extents[extent] = [self.block(history, block) for block in blocks]
            for extent in plan.dropped:
                del self.extents[extent]
            self.record = plan.record
        return plan

    def block(self, history: list[int], index: int) -> Bytes:
        return tuple(history[: (index + 1) * self.block_size])

    def load(self, first: int, count: int) -> list[Bytes]:
        assert self.record is not None
        target: list[Bytes] = [()] * count
        for read in plan_load(self.record, first, count):
            data = self.extents[read.extent]
            assert len(read.wanted) == len(data)
            for block, index in zip(data, read.wanted, strict=True):
                if index is not None:
                    assert target[index] == (), "a block is read twice"
                    target[index] = block
        return target


steps = st.tuples(
    st.sampled_from(["grow", "grow", "grow", "edit", "shrink", "slide", "lose"]), st.integers(0, 60), st.integers(1, 9)
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.integers(0, 4), st.lists(steps, max_size=25))
def test_after_any_saves_the_newest_bytes_are_loaded(
    block_size: int, max_extent_blocks: int, max_small_extents: int, script: list[tuple[str, int, int]]
) -> None:
    disk = Disk(block_size, max_extent_blocks, max_small_extents)
    fresh = itertools.count(1000)
    history: list[int] = []
    for kind, where, amount in script:
        if kind == "grow":
            history = [*history, *(next(fresh) for _ in range(amount))]
        elif kind == "edit":
            history = [*history[:where], *(next(fresh) for _ in history[where:])]
        elif kind == "shrink":
            history = history[: len(history) - amount]
        elif kind == "slide":
            history = history[amount:]
        elif disk.record is not None:
            lost = disk.record.extents[where % len(disk.record.extents)]
            present = [extent != lost for extent in disk.record.extents]
            disk.record = usable_part(disk.record, present)
            disk.extents = {extent: disk.extents[extent] for extent in disk.record.extents} if disk.record else {}
        base = disk.record
        plan = disk.save(history)
        if plan is None:
            held = 0 if base is None else common_prefix(base.tokens, as_tokens(history))
            assert held == len(history), "something was not saved"
        else:
            check(plan, base, history, disk)
        if disk.record is None:
            continue
        saved = disk.record.tokens.tolist()
        assert saved[: len(history)] == history
        num_blocks = disk.record.num_blocks
        expected = [disk.block(saved, index) for index in range(num_blocks)]
        assert disk.load(0, num_blocks) == expected
        first = where % num_blocks
        assert disk.load(first, num_blocks - first) == expected[first:]
        assert set(disk.extents) == set(disk.record.extents)


def check(plan: SavePlan, base: UserRecord | None, history: list[int], disk: Disk) -> None:
    record, size = plan.record, disk.max_extent_blocks
    assert record.tokens.tolist() == history
    assert record.generation == (1 if base is None else base.generation + 1)
    before = set() if base is None else set(base.extents)
    assert set(record.extents) - before == set(plan.new_extents)
    assert before - set(record.extents) == set(plan.dropped)
    # New extents are one run of blocks to the end, each as large as allowed.
    first = plan.new_extents[0].first_block
    assert [extent.first_block for extent in plan.new_extents] == list(range(first, record.num_blocks, size))
    assert plan.new_extents[-1].end_block == record.num_blocks
    assert all(extent.num_blocks == size for extent in plan.new_extents[:-1])
    # Bounded, whatever came before.
    assert len(record.extents) <= max(1, disk.max_small_extents) + 2 * record.num_blocks // size
    # Only what changed is written, unless too much of the rest is in small pieces.
    dirty = 0 if base is None else common_prefix(base.tokens, record.tokens) // disk.block_size
    assert first <= dirty
    if base is not None and first < dirty:
        owners = base.block_owners()[:dirty].tolist()
        small = [index for index in set(owners) if owners.count(index) * 2 < size]
        assert len(small) >= max(1, disk.max_small_extents)
        assert first <= owners.index(next(index for index in owners if index in small))


def test_an_append_writes_the_old_last_block_and_what_follows() -> None:
    disk = Disk()
    disk.save(list(range(11)))
    plan = disk.save(list(range(14)))
    assert plan is not None
    assert [(extent.first_block, extent.num_blocks) for extent in plan.new_extents] == [(5, 2)]
    assert plan.dropped == ()
    assert [(e.first_block, e.num_blocks) for e in plan.record.extents] == [(0, 4), (4, 2), (5, 2)]


def test_an_append_behind_a_full_block_does_not_touch_it() -> None:
    disk = Disk()
    disk.save(list(range(12)))
    plan = disk.save(list(range(13)))
    assert plan is not None
    assert [(extent.first_block, extent.num_blocks) for extent in plan.new_extents] == [(6, 1)]


def test_many_appends_are_compacted_and_large_extents_stay() -> None:
    disk = Disk(block_size=1, max_extent_blocks=8, max_small_extents=3)
    disk.save(list(range(16)))
    writes = []
    for length in range(17, 41):
        plan = disk.save(list(range(length)))
        assert plan is not None
        writes.append(sum(extent.num_blocks for extent in plan.new_extents))
    assert max(writes) <= 8
    assert sum(writes) <= 3 * 24
    assert disk.record is not None
    assert [extent.num_blocks for extent in disk.record.extents[:2]] == [8, 8]
    assert len(disk.record.extents) <= 3 + 40 // 4


def test_nothing_to_save() -> None:
    disk = Disk()
    assert disk.save([]) is None
    disk.save([1, 2, 3])
    assert disk.save([1, 2, 3]) is None
    assert disk.save([1, 2]) is None


@pytest.mark.parametrize("reason", ["deleted", "expired", "other block size"])
def test_a_base_that_holds_nothing_counts_by_its_generation_only(reason: str) -> None:
    disk = Disk()
    disk.save([1, 2, 3])
    assert disk.record is not None
    base = {
        "deleted": UserRecord.tombstone(6, "w", 1.0),
        "expired": replace(disk.record, generation=6, expires_at=100.0),
        "other block size": replace(disk.record, generation=6, block_size=4),
    }[reason]
    plan = disk.plan([1, 2, 3], base=base)
    assert plan is not None
    assert plan.record.generation == 7
    assert plan.record.extents == plan.new_extents
    assert plan.dropped == base.extents
    assert not plan.record.deleted


def test_a_base_that_has_not_expired_holds_what_it_holds() -> None:
    disk = Disk()
    disk.save([1, 2, 3])
    assert disk.record is not None
    assert disk.plan([1, 2, 3], base=replace(disk.record, expires_at=100.1)) is None


def test_time_to_live() -> None:
    plan = Disk().plan([1], now=50.0, ttl_seconds=10)
    assert plan is not None
    assert (plan.record.written_at, plan.record.expires_at, plan.record.writer) == (50.0, 60.0, "w")
    plan = Disk().plan([1], now=50.0)
    assert plan is not None
    assert plan.record.expires_at == 0


def test_no_extent_is_larger_than_a_record_can_name() -> None:
    plan = Disk(block_size=1).plan([0] * (MAX_EXTENT_BLOCKS + 1), max_extent_blocks=1 << 40)
    assert plan is not None
    assert [extent.num_blocks for extent in plan.new_extents] == [MAX_EXTENT_BLOCKS, 1]
