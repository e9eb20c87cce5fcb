"""The format of an object's file, and its reading and writing straight from and to memory.

A file is the object and, behind it, a trailer of 64 bytes, all numbers little-endian::

    offset  bytes
    0       8      magic, "UserKV" and two zeros
    8       4      version of this format: 3
    12      4      zero
    16      16     the key's digest, as in the file's name
    32      8      bytes of the object
    40      8      checksum of the object (``store/checksum.py``)
    48      8      zero
    56      8      XXH3 (64 bits) of the 56 bytes before

The object comes first because the kernel copies between pages of files and aligned memory an eighth slower if the two
are displaced.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import xxhash

from userkv.store.backend import ObjectCorruptError, Region
from userkv.store.checksum import Checksum
from userkv.store.regions import Cursor, overlap, region_of, total_bytes

MAGIC = b"UserKV\0\0"
VERSION = 3
_TRAILER = struct.Struct("<8sI4x16sQQ8xQ")
TRAILER_BYTES = _TRAILER.size
DIGEST_BYTES = 16

CHUNK = 1 << 19
"""Bytes to read or write before summing them, so that they are summed while they are still in the CPU's cache."""

_MOST_PIECES = os.sysconf("SC_IOV_MAX")


_Buffers: TypeAlias = "list[ctypes.Array[ctypes.c_char]]"


def write_object(descriptor: int, name: bytes, parts: Sequence[Region], checksum: int | None = None) -> int:
    """Write an object into an empty file.

    Args:
        descriptor: the file.
        name: the key's digest.
        parts: the bytes.
        checksum: of the bytes; if it is not known, they are hashed on the way.

    Returns:
        The checksum.

    Raises:
        OSError: the file is not complete.

    """
    state = Checksum()
    offset = 0
    for batch in _batches(parts):
        offset += _transfer(os.pwritev, descriptor, _buffers(batch), offset)
        if checksum is None:
            state.add(batch)
    if checksum is None:
        checksum = state.value()
    trailer = bytearray(_make_trailer(name, offset, checksum))
    _transfer(os.pwritev, descriptor, _buffers([region_of(trailer)]), offset)
    return checksum


def read_object(descriptor: int, name: bytes, parts: Sequence[Region]) -> int:
    """Read an object into ``parts``, in which the same memory may occur more than once.

    Returns:
        Its checksum, which is verified.

    Raises:
        ObjectCorruptError: the file is not what was written, or the object is another or has another size.
        OSError: it could not be read.

    """
    nbytes = total_bytes(parts)
    size = os.fstat(descriptor).st_size
    if size != nbytes + TRAILER_BYTES:
        raise ObjectCorruptError(f"the file has {size} bytes, not {nbytes} and {TRAILER_BYTES}")
    expected = _check_trailer(os.pread(descriptor, TRAILER_BYTES, nbytes), name, nbytes)
    if _read_parts(descriptor, parts) != expected:
        raise ObjectCorruptError("the file's bytes are not those that were written")
    return expected


def _make_trailer(name: bytes, nbytes: int, checksum: int) -> bytes:
    front = _TRAILER.pack(MAGIC, VERSION, name, nbytes, checksum, 0)[:-8]
    return front + xxhash.xxh3_64_intdigest(front).to_bytes(8, "little")


def _check_trailer(trailer: bytes, name: bytes, nbytes: int) -> int:
    """The object's checksum.

    Raises:
        ObjectCorruptError: this is not the trailer of such an object.

    """
    if len(trailer) != TRAILER_BYTES:
        raise ObjectCorruptError("the file ends too early")
    if xxhash.xxh3_64_intdigest(trailer[:-8]).to_bytes(8, "little") != trailer[-8:]:
        raise ObjectCorruptError("the file's trailer is damaged")
    magic, version, digest, size, checksum, _ = _TRAILER.unpack(trailer)
    if (magic, version) != (MAGIC, VERSION):
        raise ObjectCorruptError("the file is of another version")
    if digest != name:
        raise ObjectCorruptError("the file is another object's")
    if size != nbytes:
        raise ObjectCorruptError(f"the object has {size} bytes, not {nbytes}")
    return int(checksum)


def _read_parts(descriptor: int, parts: Sequence[Region]) -> int:
    state = Checksum()
    offset = 0
    # Memory that occurs twice holds the last bytes only, so each piece is hashed before the next one comes.
    for batch in _batches(parts, 1 if overlap(parts) else _MOST_PIECES):
        offset += _transfer(os.preadv, descriptor, _buffers(batch), offset)
        state.add(batch)
    return state.value()


def _batches(parts: Sequence[Region], most: int = _MOST_PIECES) -> Iterator[list[Region]]:
    """The regions in batches for one system call each, small enough to be in the CPU's cache afterwards."""
    cursor = Cursor(parts)
    while batch := cursor.take(CHUNK, most):
        yield batch


def _buffers(batch: list[Region]) -> _Buffers:
    return [(ctypes.c_char * nbytes).from_address(address) for address, nbytes in batch]


def _transfer(call: Callable[[int, _Buffers, int], int], descriptor: int, buffers: _Buffers, offset: int) -> int:
    """Read or write whole buffers, also if the system call does only a part of them. Returns their bytes."""
    nbytes = sum(map(len, buffers))
    done = call(descriptor, buffers, offset)
    while done < nbytes:
        rest = Cursor([Region(ctypes.addressof(buffer), len(buffer)) for buffer in buffers])
        rest.take(done)
        step = call(descriptor, _buffers(rest.take(nbytes)), offset + done)
        if not step:
            raise ObjectCorruptError("the file ends too early")
        done += step
    return nbytes
