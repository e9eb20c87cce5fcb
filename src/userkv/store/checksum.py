"""Checksums of KV bytes: XXH3 (64 bits), which detects accidents at memory speed. It is no defence against forgery."""

import ctypes
from collections.abc import Iterable

import xxhash

from userkv.store.backend import Region

CHUNK = 1 << 19
"""Bytes to copy before hashing them, so that they are hashed while they are still in the CPU's cache."""


def checksum(parts: Iterable[Region]) -> int:
    """The checksum of the bytes of ``parts``, one after the other."""
    state = xxhash.xxh3_64()
    for address, nbytes in parts:
        state.update((ctypes.c_char * nbytes).from_address(address))
    return state.intdigest()
