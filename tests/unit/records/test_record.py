"""The user record: what is written can be read, and nothing else can be read as a record."""

import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from userkv.core.tokens import as_tokens
from userkv.records.record import (
    MAX_EXTENT_BLOCKS,
    MIN_RECORD_BYTES,
    Extent,
    RecordError,
    TornRecordError,
    UserRecord,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
times = st.floats(0, 1e12)


@st.composite
def records(draw: st.DrawFn) -> UserRecord:
    generation, writer = draw(st.integers(1, 2**63 - 1)), draw(texts)
    if draw(st.integers(0, 9)) == 0:
        return UserRecord.tombstone(generation, writer, draw(times))
    block_size = draw(st.integers(1, 5))
    tokens = as_tokens(draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)))
    num_blocks = -(-len(tokens) // block_size)
    spans = [(0, num_blocks)]
    spans += draw(st.lists(st.tuples(st.integers(0, num_blocks - 1), st.integers(1, 9)), max_size=4))
    ids = draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(spans), max_size=len(spans), unique=True))
    extents = tuple(Extent(number, *span) for number, span in zip(ids, spans, strict=True))
    return UserRecord(generation, tokens, block_size, extents, writer, draw(times), draw(times))


def record(**changes: object) -> UserRecord:
    base = UserRecord(3, as_tokens([1, 2, 3, 4, 5]), 2, (Extent(7, 0, 2), Extent(8, 2, 1)), "host:1", 100.0)
    return replace(base, **changes)  # type: ignore[arg-type]


@given(records(), texts, texts)
def test_what_is_written_can_be_read(record: UserRecord, uid: str, namespace: str) -> None:
    data = record.encode(uid, namespace)
    assert len(data) >= MIN_RECORD_BYTES
    assert len(data).bit_count() == 1
    decoded = UserRecord.decode(data, uid, namespace)
    assert decoded == record
    assert hash(decoded) == hash(record)
    assert not decoded.tokens.flags.writeable
    assert decoded.tokens.dtype == np.int32


@given(records(), texts, texts, texts, texts)
@example(record(), "1", "2x", "12", "x")
def test_a_record_is_read_under_its_own_name_only(
    record: UserRecord, uid: str, namespace: str, other_uid: str, other_namespace: str
) -> None:
    data = record.encode(uid, namespace)
    if (uid, namespace) != (other_uid, other_namespace):
        with pytest.raises(RecordError, match="another user or namespace"):
            UserRecord.decode(data, other_uid, other_namespace)


@given(st.binary(max_size=300))
def test_random_bytes_are_no_record(data: bytes) -> None:
    for candidate in (data, b"UKVR" + data, b"UKVR\x01\x00" + data):
        with pytest.raises(RecordError):
            UserRecord.decode(candidate, "u", "n")


@given(records(), st.data())
def test_any_flipped_bit_that_counts_is_noticed(record: UserRecord, data: st.DataObject) -> None:
    encoded = record.encode("u", "n")
    position = data.draw(st.integers(0, 8 * len(encoded) - 1))
    broken = bytearray(encoded)
    broken[position // 8] ^= 1 << position % 8
    try:
        assert UserRecord.decode(bytes(broken), "u", "n") == record
    except RecordError:
        return
    assert not any(encoded[position // 8 :]), "the bit was in the record and nobody noticed"


@given(records(), st.data())
def test_any_missing_end_is_noticed(record: UserRecord, data: st.DataObject) -> None:
    encoded = record.encode("u", "n")
    used = len(encoded.rstrip(b"\0"))
    with pytest.raises(RecordError):
        UserRecord.decode(encoded[: data.draw(st.integers(0, used - 1))], "u", "n")


@given(records(), records(), st.lists(st.integers(0, 2048), max_size=6))
def test_a_mixture_of_two_records_is_one_of_them_or_torn(old: UserRecord, new: UserRecord, cuts: list[int]) -> None:
    sources = [source.encode("u", "n") for source in (old, new)]
    size = max(map(len, sources))
    sources = [source.ljust(size, b"\0") for source in sources]
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    mixed = b"".join(sources[index % 2][start:end] for index, (start, end) in enumerate(pairwise(edges)))
    try:
        assert UserRecord.decode(mixed, "u", "n") in (old, new)
    except TornRecordError:
        assert mixed not in sources


def forge(data: bytes, offset: int, value: bytes, end: int) -> bytes:
    """Change bytes and make the checksum right again."""
    forged = bytearray(data)
    forged[offset : offset + len(value)] = value
    forged[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(forged[:8] + forged[16:end])))
    return bytes(forged)


USED = 64 + 2 * 16 + 5 * 4 + 1 + 1 + 6
"""Bytes that count in ``record().encode("u", "n")``."""


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (16, struct.pack("<Q", 0)),  # generation
        (16, struct.pack("<Q", 2**63)),
        (24, struct.pack("<d", float("nan"))),  # written_at
        (32, struct.pack("<d", float("-inf"))),  # expires_at
        (40, struct.pack("<I", 0)),  # block_size
        (40, struct.pack("<I", 1)),  # five blocks then, but the extents cover three
        (6, struct.pack("<H", 1)),  # a tombstone with tokens
        (64, struct.pack("<Q", 2**64 - 1)),  # extent id
        (64, struct.pack("<Q", 8)),  # twice the same
        (72, struct.pack("<I", 1)),  # block 0 is not covered
        (88, struct.pack("<I", 3)),  # an extent behind the end
        (92, struct.pack("<I", 0)),  # an extent without blocks
        (92, struct.pack("<I", MAX_EXTENT_BLOCKS + 1)),
        (USED - 1, b"\xff"),  # the writer's name is no UTF-8
    ],
)
def test_a_record_that_contradicts_itself_is_refused(offset: int, value: bytes) -> None:
    data = record().encode("u", "n")
    assert UserRecord.decode(forge(data, 0, b"", USED), "u", "n") == record()
    with pytest.raises(RecordError, match="contradicts itself"):
        UserRecord.decode(forge(data, offset, value, USED), "u", "n")


@given(st.integers(44, 63), st.binary(min_size=1, max_size=8))
def test_forged_lengths_are_not_believed(offset: int, value: bytes) -> None:
    data = record().encode("u", "n")
    forged = forge(data, offset, value[: 64 - offset], USED)
    if forged[:USED] != data[:USED]:
        with pytest.raises(RecordError):
            UserRecord.decode(forged, "u", "n")


@pytest.mark.parametrize("offset", range(44, 64, 4))
def test_lengths_beyond_the_bytes_that_are_there(offset: int) -> None:
    data = record().encode("u", "n")
    with pytest.raises(TornRecordError, match="but there are 1024"):
        UserRecord.decode(forge(data, offset, b"\xff\xff\xff\xff", len(data)), "u", "n")


def test_a_torn_record_is_worth_another_try_and_another_schema_is_not() -> None:
    data = record().encode("u", "n")
    with pytest.raises(TornRecordError):
        UserRecord.decode(data[:70] + bytes(len(data) - 70), "u", "n")
    with pytest.raises(RecordError, match="schema 2") as caught:
        UserRecord.decode(forge(data, 4, b"\x02", USED), "u", "n")
    assert not isinstance(caught.value, TornRecordError)


def test_the_documented_format() -> None:
    data = record().encode("u", "n")
    assert data[:8] == b"UKVR\x01\x00\x00\x00"
    assert struct.unpack_from("<QddIIIIII", data, 16) == (3, 100.0, 0.0, 2, 2, 5, 1, 1, 6)
    assert struct.unpack_from("<QIIQII5i", data, 64) == (7, 0, 2, 8, 2, 1, 1, 2, 3, 4, 5)
    assert data[USED - 8 : USED] == b"unhost:1"
    assert not any(data[USED:])


@pytest.mark.parametrize("num_tokens", [1, 200, 260, 500, 5000])
def test_sizes_are_classes(num_tokens: int) -> None:
    tokens = as_tokens(range(num_tokens))
    data = record(tokens=tokens, block_size=num_tokens, extents=(Extent(1, 0, 1),)).encode("u", "n")
    assert len(data) == max(1024, 1 << (64 + 16 + 4 * num_tokens + 8 - 1).bit_length())


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 0},
        {"block_size": 0},
        {"written_at": float("inf")},
        {"expires_at": -1.0},
        {"tokens": as_tokens([])},
        {"deleted": True},
        {"tokens": np.zeros(5, dtype=np.int32)},
        {"extents": ()},
        {"extents": (Extent(1, 0, 2),)},
        {"extents": (Extent(1, 1, 2),)},
        {"extents": (Extent(1, 0, 1), Extent(2, 2, 1))},
        {"extents": (Extent(1, 0, 3), Extent(2, 3, 1))},
        {"extents": (Extent(1, 0, 2), Extent(1, 2, 1))},
    ],
)
def test_invariants(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        record(**changes)


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (2**63, 0, 1), (1, -1, 1), (1, 0, 0), (1, 2**32 - 1, 1)])
def test_impossible_extents(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="extent"):
        Extent(*numbers)


def test_extents_may_reach_beyond_the_end() -> None:
    assert record(extents=(Extent(1, 0, 9),)).num_blocks == 3


def test_the_last_extent_that_covers_a_block_holds_it() -> None:
    extents = (Extent(1, 0, 3), Extent(2, 1, 1), Extent(3, 0, 1), Extent(4, 2, 5))
    assert record(extents=extents).block_owners().tolist() == [2, 1, 3]


def test_expiry() -> None:
    assert not record().expired(1e12)
    assert not record(expires_at=50.0).expired(49.9)
    assert record(expires_at=50.0).expired(50.0)


def test_equality() -> None:
    assert record() == record()
    assert record() != record(generation=4)
    assert record() != record(tokens=as_tokens([1, 2, 3, 4, 6]))
    assert record() != "a record"
