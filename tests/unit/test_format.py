"""``docs/format.md`` is true: its tables decode stored bytes, and no stored byte changes unnoticed.

A golden copy that differs means a new format: raise the version in the module that defines it, and change the page.
"""

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.support.local import files_of, open_local, settle
from userkv.core.request import KVScope, UserKey
from userkv.core.tokens import as_tokens
from userkv.engine.pool.scheduler.namespace import Namespaces
from userkv.records.keys import LayerMooncakeUserKey, MooncakeUserKey, ValueType, pool_uid
from userkv.records.record import MAX_EXTENT_BLOCKS, MIN_RECORD_BYTES, Extent, UserRecord
from userkv.store.checksum import checksum
from userkv.store.mooncake import header
from userkv.store.mooncake.objects import LONGEST_NAME, name_of
from userkv.store.records import group_of
from userkv.store.regions import region_of

PAGE = Path(__file__).parents[2] / "docs/format.md"
TYPES = {"u16": "H", "u32": "I", "u64": "Q", "f64": "d", "bytes": "s", "zero": "s"}

UID, NAMESPACE, WRITER = "alice", "model#1#f", "host:7"
RECORD = UserRecord(
    3, as_tokens([5, -6, 7]), 2, (Extent(1 << 62, 0, 1), Extent(9, 1, 1)), WRITER, 1700000000.5, 1800000000.0
)
RECORD_HEX = (
    "554b56520100000052e47d6d2d684ef7030000000000000000002040fc54d941"
    "0000008074d2da41020000000200000003000000050000000900000006000000"
    "0000000000000040000000000100000009000000000000000100000001000000"
    "05000000faffffff07000000616c6963656d6f64656c23312366686f73743a37"
)
TOMBSTONE_HEX = (
    "554b5652010001001d126ce10dd7817e040000000000000000002040fc54d941"
    "0000000000000000010000000000000000000000050000000900000006000000"
    "616c6963656d6f64656c23312366686f73743a37"
)
PAYLOAD = bytes(range(1, 30))
PAYLOAD_MEMORY = bytearray(PAYLOAD)
PAYLOAD_CHECKSUM = 5364735488919681078
KEY = "alice@model@1@0@kv_cache@x9"
MOONCAKE_HEADER_HEX = (
    "554b565802000000798e0fc6af4e0dba78601447c36b6b571d00000000000000"
    "3638fdea805e734a00000000000000000000000000000000a381b7c7906fea95"
)
TRAILER_HEX = (
    "557365724b5600000300000000000000798e0fc6af4e0dba78601447c36b6b57"
    "1d000000000000003638fdea805e734a000000000000000050376aad0bdfc8d5"
)


def section(title: str) -> str:
    """The text of a section of the page."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def tables(title: str) -> list[list[tuple[int, str, int, str]]]:
    """The byte tables of a section, each a list of (offset, type, length, field)."""
    found: list[list[tuple[int, str, int, str]]] = []
    for block in re.findall(r"((?:^\|.*\n)+)", section(title), re.MULTILINE):
        rows = re.findall(r"^\| (\d+) \| `(\w+)(?:\[(\d+)\])?` \|(?: `(\w+)`)?", block, re.MULTILINE)
        if rows:
            found.append([(int(at), kind, int(length or 1), name) for at, kind, length, name in rows])
    return found


def decode(table: list[tuple[int, str, int, str]], data: bytes) -> dict[str, Any]:
    """Read bytes as a table of the page says; the table must have no gap."""
    fields, end = {}, 0
    for offset, kind, length, name in table:
        assert offset == end, f"{name} is at {offset}, but the field before ends at {end}"
        code = f"<{length if TYPES[kind] == 's' else ''}{TYPES[kind]}"
        (value,) = struct.unpack_from(code, data, offset)
        end += struct.calcsize(code)
        if kind == "zero":
            assert value == bytes(length)
        else:
            fields[name] = value
    assert len(data) == end
    return fields


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def test_record_decodes_as_the_page_says() -> None:
    data = RECORD.encode(UID, NAMESPACE)
    head, extent = tables("User record")
    fields = decode(head, data[:64])
    end = 64 + 2 * 16 + 3 * 4 + len(UID + NAMESPACE + WRITER)
    assert fields == {
        "magic": b"UKVR",
        "schema": 1,
        "flags": 0,
        "checksum": xxhash.xxh3_64_intdigest(data[:8] + data[16:end]),
        "generation": 3,
        "written_at": 1700000000.5,
        "expires_at": 1800000000.0,
        "block_size": 2,
        "num_extents": 2,
        "num_tokens": 3,
        "uid_bytes": len(UID),
        "namespace_bytes": len(NAMESPACE),
        "writer_bytes": len(WRITER),
    }
    assert decode(extent, data[64:80]) == {"extent_id": 1 << 62, "first_block": 0, "num_blocks": 1}
    assert decode(extent, data[80:96]) == {"extent_id": 9, "first_block": 1, "num_blocks": 1}
    assert np.frombuffer(data, "<i4", 3, 96).tolist() == [5, -6, 7]
    assert data[108:end].decode() == UID + NAMESPACE + WRITER
    assert data[end:] == bytes(MIN_RECORD_BYTES - end)


def test_golden_records() -> None:
    assert RECORD.encode(UID, NAMESPACE).rstrip(b"\0").hex() == RECORD_HEX
    assert UserRecord.tombstone(4, WRITER, 1700000000.5).encode(UID, NAMESPACE).rstrip(b"\0").hex() == TOMBSTONE_HEX
    golden = bytes.fromhex(RECORD_HEX).ljust(MIN_RECORD_BYTES, b"\0")
    assert UserRecord.decode(golden, UID, NAMESPACE) == RECORD


def test_limits_of_records_on_the_page() -> None:
    text = section("User record")
    assert f"1 to 2^{MAX_EXTENT_BLOCKS.bit_length() - 1}" in text
    assert f"least {MIN_RECORD_BYTES} bytes" in text


def test_golden_checksum_and_its_formula() -> None:
    assert checksum([region_of(PAYLOAD_MEMORY)]) == PAYLOAD_CHECKSUM
    words = np.frombuffer(PAYLOAD.ljust(32, b"\0"), "<u8").tolist()
    (factor,) = re.findall(r"0x([0-9A-F]{16})", section("Checksum"))
    mixed = [word ^ (place * int(factor, 16) % 2**64) for place, word in enumerate(words)]
    assert sum((x % 2**32) * (x >> 32) + x for x in mixed) % 2**64 == PAYLOAD_CHECKSUM


def test_mooncake_header_decodes_as_the_page_says() -> None:
    data = header.pack(KEY, len(PAYLOAD), PAYLOAD_CHECKSUM)
    assert data.hex() == MOONCAKE_HEADER_HEX
    (table,) = tables("Extent in Mooncake")
    assert decode(table, data) == {
        "magic": b"UKVX",
        "version": 2,
        "key_digest": digest(KEY),
        "payload_bytes": len(PAYLOAD),
        "payload_checksum": PAYLOAD_CHECKSUM,
        "header_checksum": xxhash.xxh3_64_intdigest(data[:56]),
    }


def test_object_file_and_directory_are_as_the_page_says(tmp_path: Path) -> None:
    group = group_of(UID, NAMESPACE)
    with open_local(0, tmp_path) as backend:
        backend.put(group, KEY, [region_of(PAYLOAD_MEMORY)])
        settle(backend)
        (file,) = files_of(tmp_path)
        data = file.read_bytes()
    assert file.relative_to(tmp_path) == Path("users", digest(group).hex(), digest(KEY).hex())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["userkv.lock", "users"]
    assert data[:-64] == PAYLOAD
    trailer = data[-64:]
    assert trailer.hex() == TRAILER_HEX
    (table,) = tables("Object file")
    assert decode(table, trailer) == {
        "magic": b"UserKV\0\0",
        "version": 3,
        "key_digest": digest(KEY),
        "object_bytes": len(PAYLOAD),
        "object_checksum": PAYLOAD_CHECKSUM,
        "trailer_checksum": xxhash.xxh3_64_intdigest(trailer[:56]),
    }


def test_golden_keys() -> None:
    extent = MooncakeUserKey("alice", "m#1#f", 2, 1, ValueType.KV_CACHE, 31)
    assert str(extent) == "alice@m%231%23f@2@1@kv_cache@x1f"
    assert str(LayerMooncakeUserKey(extent, 3)) == "alice@m%231%23f@2@1@kv_cache@3@x1f"
    assert str(MooncakeUserKey("alice", "m#1#f", 2, 0, ValueType.TOKEN_ID)) == "alice@m%231%23f@2@0@token_id"
    assert group_of("a@b", "m#1#f") == "a%40b@m%231%23f"
    assert pool_uid(UserKey("alice", KVScope(lora_number=5))) == "alice"
    assert pool_uid(UserKey("a/b@c", KVScope("lora", "/p", "salt", 5))) == "a%2Fb%40c/lora/%2Fp/salt"


def test_golden_names_in_mooncake() -> None:
    key = "k" * (LONGEST_NAME + 1)
    assert name_of(key[1:]) == key[1:]
    assert name_of(key) == f"{'k' * 167}~{digest(key).hex()}"
    assert f"at most {LONGEST_NAME} bytes" in section("Keys")


def test_golden_namespace() -> None:
    assert Namespaces("mod el", "v#1", {"a": 1}).of(UserKey("u"), 0) == "mod%20el#v%231#732973533f3e7cd5"
