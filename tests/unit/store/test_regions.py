"""Copying between scattered memory."""

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from tests.support.backends import Memory, filled
from userkv.store.backend import Region
from userkv.store.checksum import checksum, prepare
from userkv.store.regions import Cursor, gather, overlap, region_of, scatter, total_bytes, view

prepare()  # No test should take the second that compiling takes.

SIZES = st.lists(st.integers(0, 20) | st.integers(0, 5000), max_size=8)


def split_otherwise(nbytes: int, sizes: list[int]) -> list[int]:
    """The sizes, cut or filled up to ``nbytes`` together."""
    result = []
    for size in sizes:
        result.append(min(size, nbytes))
        nbytes -= result[-1]
    return [*result, nbytes]


@given(SIZES, SIZES, st.integers(0, 9))
def test_bytes_arrive_in_order_whatever_the_pieces(sizes: list[int], others: list[int], seed: int) -> None:
    nbytes = sum(sizes)
    source = filled(nbytes, seed)
    middle = Memory(nbytes, seed, sizes)
    target = Memory(nbytes, seed, split_otherwise(nbytes, others))
    expected = checksum(source.parts)
    assert gather(source.parts, middle.parts) == expected
    assert middle.data == source.data
    assert scatter(middle.parts, target.parts) == expected
    assert target.data == source.data


def test_nothing_beside_the_pieces_is_touched() -> None:
    target = Memory(10_000, 1, [3333, 3333, 3334])
    gather(filled(10_000).parts, target.parts)
    base = region_of(target.buffer).address
    beside = bytearray(target.buffer)
    for address, nbytes in target.parts:
        beside[address - base : address - base + nbytes] = bytes(nbytes)
    assert not any(beside)


def test_memory_that_nobody_wants_may_occur_again_and_again() -> None:
    source = filled(30_000)
    wanted = Memory(10_000)
    nobody_wants = bytearray(10_000)
    scratch = region_of(nobody_wants)
    assert scatter(source.parts, [scratch, *wanted.parts, scratch]) == checksum(source.parts)
    assert wanted.data == source.data[10_000:20_000]


def test_overlap() -> None:
    assert not overlap([])
    assert not overlap([Region(10, 5), Region(0, 10), Region(15, 1)])
    assert overlap([Region(10, 5), Region(0, 11)])
    assert overlap([Region(0, 5), Region(10, 5), Region(0, 5)])


def test_cursor() -> None:
    cursor = Cursor([Region(100, 10), Region(0, 0), Region(300, 5)])
    assert cursor.take(4) == [(100, 4)]
    assert cursor.take(8) == [(104, 6), (300, 2)]
    assert cursor.take(100) == [(302, 3)]
    assert cursor.take(1) == []
    assert Cursor([Region(i * 10, 1) for i in range(9)]).take(9, most=2) == [(0, 1), (10, 1)]


def test_a_view_is_the_memory_itself() -> None:
    memory = bytearray(b"abc")
    region = region_of(memory)
    view(region)[1] = ord("x")
    assert memory == b"axc"
    assert ctypes.string_at(region.address, 3) == b"axc"
    assert total_bytes([region, region]) == 6
    assert region_of(bytearray()).nbytes == 0
