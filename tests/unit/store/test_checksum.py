"""The checksum of KV bytes."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.backends import Memory, filled
from userkv.store.backend import Region
from userkv.store.checksum import Checksum, checksum, prepare
from userkv.store.regions import region_of

prepare()  # No test should take the second that compiling takes.

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def defined(data: bytes) -> int:
    """The checksum as its module's text defines it."""
    data += bytes(-len(data) % 8)
    total = 0
    for place in range(len(data) // 8):
        x = int.from_bytes(data[8 * place : 8 * place + 8], "little") ^ (place * GOLDEN & MASK)
        total += (x & 0xFFFFFFFF) * (x >> 32) + x
    return total & MASK


def of(data: bytes) -> int:
    memory = bytearray(data)  # An address keeps nothing alive.
    return checksum([region_of(memory)])


@given(st.binary(max_size=300))
def test_it_is_what_its_definition_says(data: bytes) -> None:
    assert of(data) == defined(data)


@given(st.lists(st.integers(0, 40) | st.integers(0, 3000), max_size=8), st.integers(0, 9))
def test_it_does_not_depend_on_the_pieces(sizes: list[int], seed: int) -> None:
    memory = Memory(sum(sizes), seed, sizes)
    for index, (address, nbytes) in enumerate(memory.parts):
        ctypes.memset(address, index + 1, nbytes)
    one_by_one = Checksum()
    for part in memory.parts:
        one_by_one.add([part])
    assert checksum(memory.parts) == one_by_one.value() == defined(memory.data)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_damage_within_half_a_word_is_found(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1)) // 4 * 4
    damaged = draw.draw(st.binary(min_size=len(data[at : at + 4]), max_size=len(data[at : at + 4])))
    other = data[:at] + damaged + data[at + 4 :]
    assert (of(other) == of(data)) == (other == data)


def test_what_lies_at_another_place_counts_differently() -> None:
    data = filled(64 << 10).data
    swapped = data[32 << 10 :] + data[: 32 << 10]
    assert of(swapped) != of(data)
    assert of(bytes(8) + data[8:] + data[:8]) != of(data + bytes(8))
    assert of(bytes(4096)) != of(bytes(8192))


@pytest.mark.parametrize(("solid", "parts"), [(200, 100), (100, 200), (8, 0), (0, 8)])
def test_both_sides_of_a_copy_have_as_many_bytes(solid: int, parts: int) -> None:
    memory = np.zeros(200, np.uint8)
    sides = ([Region(memory.ctypes.data, solid)], [Region(memory.ctypes.data, parts)])
    with pytest.raises(ValueError, match="as many bytes"):
        Checksum().copy(*sides, into_solid=True)


def test_bytes_at_any_address() -> None:
    memory = np.zeros(1000, np.uint8)
    data = filled(777).data
    for offset in range(9):
        memory[offset : offset + 777] = np.frombuffer(data, np.uint8)
        assert checksum([Region(memory.ctypes.data + offset, 777)]) == defined(data)


@pytest.mark.parametrize("module", ["userkv.store.local", "userkv.store.mooncake.backend", "userkv.cli"])
def test_nothing_is_compiled_before_a_pool_is_opened(module: str) -> None:
    """vLLM's workers for CPUs do not start in a process that has imported what compiles."""
    code = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
