"""The user record: the one small object that says which history of a user is stored, and in which extents.

Binary format, schema 1, little-endian, no implicit padding::

    offset  size  field
         0     4  magic, b"UKVR"
         4     2  schema version, 1
         6     2  flags: bit 0 = tombstone
         8     8  XXH3-64 of all other bytes up to the end of the writer
        16     8  generation
        24     8  written_at, float64, unix seconds
        32     8  expires_at, float64, unix seconds, 0 = never
        40     4  block_size, tokens
        44     4  E, number of extents
        48     4  T, number of tokens
        52     4  U, bytes of the user id
        56     4  N, bytes of the namespace
        60     4  W, bytes of the writer
        64  16*E  extents, oldest first: id (8), first block (4), number of blocks (4)
             4*T  tokens, int32
       U + N + W  user id, namespace, writer, UTF-8
                  zeros up to the size class: the next power of two, at least 1 KiB

Pools replace records in place, so a reader may see a mixture of two of them. The checksum covers every byte that
counts, lengths included, so a mixture is told from a record; the zeros at the end do not count. User id and namespace
are inside and compared: a record that was found under a wrong key is never believed. Lengths are believed only after
they were compared with the bytes that are there.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from userkv.core.errors import UserKVError
from userkv.core.tokens import TokenArray, as_tokens

MAGIC = b"UKVR"
SCHEMA = 1
MIN_RECORD_BYTES = 1024
MAX_EXTENT_BLOCKS = 1 << 20
"""Blocks of one extent at most, so that nobody makes room for the billions that a forged record could name."""

_TOMBSTONE = 1
_MAX_BLOCK = (1 << 32) - 1
_START = struct.Struct("<4sHH")
_CHECKSUM = struct.Struct("<Q")
_REST = struct.Struct("<Qdd6I")
_HEADER_BYTES = 64
_COVERED = _START.size + _CHECKSUM.size
_EXTENT = np.dtype([("id", "<u8"), ("first", "<u4"), ("count", "<u4")])


class RecordError(UserKVError):
    """These bytes are no record of this user in this namespace, or one of another schema version."""


class TornRecordError(RecordError):
    """The bytes do not fit together: perhaps a mixture of two records, so reading again may help."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Immutable KV of the blocks ``[first_block, end_block)`` of a user: one object per worker, or worker and layer.

    Attributes:
        extent_id: random and never reused, 0 <= id < 2**63.
        first_block: where in the user's history it begins, in blocks.
        num_blocks: at least 1, at most ``MAX_EXTENT_BLOCKS``.

    """

    extent_id: int
    first_block: int
    num_blocks: int

    def __post_init__(self) -> None:
        if not 0 <= self.extent_id < 1 << 63:
            raise ValueError(f"extent id {self.extent_id} is not in [0, 2**63)")
        if self.first_block < 0 or not 1 <= self.num_blocks <= MAX_EXTENT_BLOCKS or self.end_block > _MAX_BLOCK:
            raise ValueError(f"an extent cannot cover {self.num_blocks} blocks from block {self.first_block} on")

    @property
    def end_block(self) -> int:
        """The first block behind it."""
        return self.first_block + self.num_blocks


@dataclass(frozen=True, slots=True, eq=False)
class UserRecord:
    """What is stored of a user. Immutable; compares by value.

    Attributes:
        generation: at least 1; grows with each commit.
        tokens: the history, int32, read-only; empty for a tombstone and only then.
        block_size: tokens per block.
        extents: oldest first; where several cover a block, the last of them holds it. Together they cover every block
            of the tokens. They may reach beyond the last one; what lies there is of no use.
        writer: who committed it, for operators.
        written_at: unix seconds.
        expires_at: unix seconds from which on it counts as absent; 0 = never.
        deleted: a tombstone: the user was deleted.

    Raises:
        ValueError: one of these does not hold.

    """

    generation: int
    tokens: TokenArray
    block_size: int
    extents: tuple[Extent, ...]
    writer: str
    written_at: float
    expires_at: float = 0.0
    deleted: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.generation < 1 << 63:
            raise ValueError(f"generation {self.generation} is not in [1, 2**63)")
        if not 1 <= self.block_size <= _MAX_BLOCK:
            raise ValueError(f"a block of {self.block_size} tokens cannot be")
        if not (0 <= self.written_at < math.inf and 0 <= self.expires_at < math.inf):
            raise ValueError("times are finite and not negative")
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 1 or self.tokens.flags.writeable:
            raise ValueError("tokens must be a one-dimensional, read-only int32 array")
        if self.deleted != (not self.tokens.size) or (self.deleted and self.extents):
            raise ValueError("a tombstone has neither tokens nor extents, and every other record has tokens")
        if len({extent.extent_id for extent in self.extents}) != len(self.extents):
            raise ValueError("two extents have the same id")
        self._check_cover()

    @classmethod
    def tombstone(cls, generation: int, writer: str, now: float) -> "UserRecord":
        """The record of a user who was deleted."""
        return cls(generation, as_tokens([]), 1, (), writer, now, deleted=True)

    @property
    def num_blocks(self) -> int:
        """Blocks that the tokens fill; the last one perhaps in part."""
        return -(-len(self.tokens) // self.block_size)

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return 0 < self.expires_at <= now

    def block_owners(self) -> npt.NDArray[np.intp]:
        """For each block of the tokens, the index of the extent that holds it."""
        owners = np.zeros(self.num_blocks, dtype=np.intp)
        for index, extent in enumerate(self.extents):
            owners[extent.first_block : extent.end_block] = index
        return owners

    def encode(self, uid: str, namespace: str) -> bytes:
        """The record's bytes, padded to a size class, so that replacing a record mostly keeps its size."""
        extents = np.array([(e.extent_id, e.first_block, e.num_blocks) for e in self.extents], dtype=_EXTENT)
        texts = [text.encode() for text in (uid, namespace, self.writer)]
        start = _START.pack(MAGIC, SCHEMA, _TOMBSTONE if self.deleted else 0)
        counts = (self.block_size, len(extents), len(self.tokens), *map(len, texts))
        rest = _REST.pack(self.generation, self.written_at, self.expires_at, *counts)
        body = b"".join((rest, extents.tobytes(), self.tokens.astype("<i4").tobytes(), *texts))
        data = start + _CHECKSUM.pack(_checksum(start, body)) + body
        return data.ljust(max(MIN_RECORD_BYTES, 1 << (len(data) - 1).bit_length()), b"\0")

    @staticmethod
    def decode(data: bytes, uid: str, namespace: str) -> "UserRecord":
        """The record that ``data`` holds.

        Raises:
            TornRecordError: the checksum is wrong, or bytes are missing.
            RecordError: it is no record, of another schema version, of another user or of another namespace.

        """
        if len(data) < _HEADER_BYTES or data[:4] != MAGIC:
            raise RecordError("these bytes are not a user record")
        _, schema, flags = _START.unpack_from(data)
        if schema != SCHEMA:
            raise RecordError(f"the record has schema {schema}; this version reads schema {SCHEMA} only")
        generation, written_at, expires_at, block_size, *counts = _REST.unpack_from(data, _COVERED)
        num_extents, num_tokens, *text_sizes = counts
        tokens_at = _HEADER_BYTES + num_extents * _EXTENT.itemsize
        texts_at = tokens_at + 4 * num_tokens
        end = texts_at + sum(text_sizes)
        view = memoryview(data)
        if end > len(data):
            raise TornRecordError(f"the record claims {end} bytes, but there are {len(data)}")
        if _CHECKSUM.unpack_from(data, _START.size)[0] != _checksum(view[: _START.size], view[_COVERED:end]):
            raise TornRecordError("the record's checksum is wrong")
        texts = []
        for size in text_sizes:
            texts.append(bytes(view[texts_at : texts_at + size]))
            texts_at += size
        if texts[0] != uid.encode() or texts[1] != namespace.encode():
            raise RecordError("the record is of another user or namespace")
        extents = np.frombuffer(data, _EXTENT, num_extents, _HEADER_BYTES)
        # A copy, so that nobody keeps the zeros at the end in memory.
        tokens = np.frombuffer(data, "<i4", num_tokens, tokens_at).astype(np.int32)
        tokens.flags.writeable = False
        try:
            return UserRecord(
                generation=generation,
                tokens=tokens,
                block_size=block_size,
                extents=tuple(Extent(*extent) for extent in extents.tolist()),
                writer=texts[2].decode(),
                written_at=written_at,
                expires_at=expires_at,
                deleted=bool(flags & _TOMBSTONE),
            )
        except ValueError as error:
            raise RecordError(f"the record contradicts itself: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UserRecord):
            return NotImplemented
        return self._rest() == other._rest() and np.array_equal(self.tokens, other.tokens)

    def __hash__(self) -> int:
        return hash((self.generation, self.extents))

    def _rest(self) -> tuple[object, ...]:
        times = (self.written_at, self.expires_at)
        return (self.generation, self.block_size, self.extents, self.writer, times, self.deleted)

    def _check_cover(self) -> None:
        if self.deleted:
            return
        ordered = sorted(self.extents, key=lambda extent: extent.first_block)
        covered = 0
        for extent in ordered:
            if extent.first_block > covered or extent.first_block >= self.num_blocks:
                raise ValueError(f"no extent covers block {covered}, or one begins behind the last block")
            covered = max(covered, extent.end_block)
        if covered < self.num_blocks:
            raise ValueError(f"no extent covers block {covered}")


def _checksum(start: bytes | memoryview, body: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(start)
    state.update(body)
    return state.intdigest()
