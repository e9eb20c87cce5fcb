"""Copying and summing of bytes in one pass, compiled by Numba (which vLLM brings) for the CPU that it runs on.

One pass, since memory is the limit: what is summed was just loaded to be copied, so that summing costs nothing on top.
And one call for as many pieces as there are, since nothing here holds the interpreter's lock: a call per piece of
128 KiB takes and gives up that lock so often that two threads are no faster than one.

Everything here works on addresses: the caller answers for their being valid.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

Words = npt.NDArray[np.uint64]

_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_KEY = np.uint64(0x9E3779B97F4A7C15)
"""The golden ratio: its multiples are spread evenly, so every word's place has a key of its own."""
_BYTES = np.uint64(8)
_ONE = np.uint64(1)
_NOWHERE = np.uint64(0)


@intrinsic
def _words_at(_: Any, address: Any) -> Any:
    """The address as a pointer to words."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.uint64)(address), generate


@intrinsic
def _bytes_at(_: Any, address: Any) -> Any:
    """The address as a pointer to bytes."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(address), generate


@njit(nogil=True)
def _mixed(word: np.uint64, key: np.uint64) -> np.uint64:
    keyed = word ^ key
    return (keyed & _LOW) * (keyed >> _HALF) + keyed


@njit(nogil=True)
def _sum_words(source: np.uint64, count: np.uint64, place: np.uint64) -> np.uint64:
    words = carray(_words_at(source), count)
    total, key = np.uint64(0), place * _KEY
    for i in range(count):
        total += _mixed(words[i], key)
        key += _KEY
    return total


@njit(nogil=True)
def _copy_words(target: np.uint64, source: np.uint64, count: np.uint64, place: np.uint64) -> np.uint64:
    words, copy = carray(_words_at(source), count), carray(_words_at(target), count)
    total, key = np.uint64(0), place * _KEY
    for i in range(count):
        word = words[i]
        copy[i] = word
        total += _mixed(word, key)
        key += _KEY
    return total


@njit(nogil=True)
def _take_bytes(target: np.uint64, source: np.uint64, nbytes: np.uint64, state: Words) -> None:
    """Bytes that do not fill a word, at either end of a piece."""
    data, copy = carray(_bytes_at(source), nbytes), carray(_bytes_at(target), nbytes)
    for i in range(nbytes):
        byte = data[i]
        if target != _NOWHERE:
            copy[i] = byte
        within = state[1] % _BYTES
        state[2] |= np.uint64(byte) << (within * _BYTES)
        if within == _BYTES - _ONE:
            state[0] += _mixed(state[2], state[1] // _BYTES * _KEY)
            state[2] = 0
        state[1] += _ONE


@njit(nogil=True)
def _take(target: np.uint64, source: np.uint64, nbytes: np.uint64, state: Words) -> None:
    head = min(nbytes, (_BYTES - state[1] % _BYTES) % _BYTES)
    if head:
        _take_bytes(target, source, head, state)
        target, source, nbytes = target + (head if target else _NOWHERE), source + head, nbytes - head
    count = nbytes // _BYTES
    if target != _NOWHERE:
        state[0] += _copy_words(target, source, count, state[1] // _BYTES)
    else:
        state[0] += _sum_words(source, count, state[1] // _BYTES)
    done = count * _BYTES
    state[1] += done
    if nbytes > done:
        _take_bytes(target + (done if target else _NOWHERE), source + done, nbytes - done, state)


@njit(nogil=True)
def add(parts: Any, state: Any) -> None:
    """Go on summing with the bytes of ``parts`` (rows of address and size); ``state``: sum, bytes so far, open word."""
    for i in range(len(parts)):
        _take(_NOWHERE, parts[i, 0], parts[i, 1], state)


@njit(nogil=True)
def copy(solid: Any, parts: Any, into_solid: bool, state: Any) -> None:
    """Copy between lists of regions of the same total size, and sum the bytes on the way; see :func:`add`."""
    row = -1
    part = left = np.uint64(0)
    for i in range(len(solid)):
        address, nbytes = solid[i, 0], solid[i, 1]
        while nbytes:
            while not left:
                row += 1
                part, left = parts[row, 0], parts[row, 1]
            step = min(nbytes, left)
            if into_solid:
                _take(address, part, step, state)
            else:
                _take(part, address, step, state)
            address, nbytes = address + step, nbytes - step
            part, left = part + step, left - step
