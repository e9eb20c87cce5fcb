"""Single operations on a connected Mooncake client: extents, records, and where they are.

They block for as long as the library does, and raise the errors of ``store/backend.py``.
"""

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolUnavailableError,
    Region,
    Tier,
)
from userkv.store.checksum import checksum
from userkv.store.mooncake import errors, header
from userkv.store.mooncake.connection import Client
from userkv.store.mooncake.recent import Place
from userkv.store.regions import gather, scatter, total_bytes

RETRY_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Seconds before a write is tried again that may work in a moment. A master without room evicts within 20 ms.

Not more of them: every try without room makes the master evict more.
"""
READ_ATTEMPTS = 4
READ_PAUSE = 0.005
AT_ONCE = 0.5
"""Seconds: a call that fails within them did not wait for anybody, and may be repeated."""
RECORD_GUESS = 1 << 16
LONGEST_NAME = 200
"""Longer names would not do as file names on an SSD."""


class Delivery:
    """Says whether the memory of a caller may still be used for him. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = True

    def end(self) -> None:
        """Wait until nobody uses the memory, and let nobody begin."""
        with self.lock:
            self.open = False


def name_of(key: str) -> str:
    """The name of an object in Mooncake: its key, shortened if need be."""
    if len(key.encode()) <= LONGEST_NAME:
        return key
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return f"{key.encode()[: LONGEST_NAME - 33].decode(errors='ignore')}~{digest}"


def placement(user: str, copies: int) -> Any:
    """How Mooncake shall keep an object of this user."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.group_ids = [user]
    config.replica_num = copies
    return config


def write_extent(client: Client, key: str, parts: Sequence[Region], kept: Any) -> None:
    """Write an extent straight from ``parts``."""
    with client.arena.lend(header.SIZE) as address:
        head = header.pack(key, total_bytes(parts), checksum(parts))
        ctypes.memmove(address, head, header.SIZE)
        _write_object(client, key, [Region(address, header.SIZE), *parts], kept)


def write_staged(client: Client, key: str, parts: Sequence[Region], kept: Any, delivery: Delivery) -> None:
    """Write an extent by way of the shared memory."""
    nbytes = total_bytes(parts)
    with client.arena.lend(header.SIZE + nbytes) as address:
        with delivery.lock:
            if not delivery.open:
                return
            digest = gather(parts, [Region(address + header.SIZE, nbytes)])
        ctypes.memmove(address, header.pack(key, nbytes, digest), header.SIZE)
        _write_object(client, key, [Region(address, header.SIZE + nbytes)], kept)


def read_extent(client: Client, key: str, parts: Sequence[Region]) -> None:
    """Read an extent straight into ``parts``, and verify it."""
    twice = doubles(parts)
    with client.arena.lend(header.SIZE + sum(parts[index].nbytes for index in twice)) as address:
        targets = list(parts)
        spare = address + header.SIZE
        for index in twice:
            targets[index] = Region(spare, parts[index].nbytes)
            spare += parts[index].nbytes
        _read_object(client, key, [Region(address, header.SIZE), *targets])
        digest = checksum(targets)
        _verify(client, key, ctypes.string_at(address, header.SIZE), total_bytes(parts), digest)


def read_staged(client: Client, key: str, parts: Sequence[Region], delivery: Delivery) -> None:
    """Read an extent by way of the shared memory, and verify it."""
    nbytes = total_bytes(parts)
    with client.arena.lend(header.SIZE + nbytes) as address:
        _read_object(client, key, [Region(address, header.SIZE + nbytes)])
        with delivery.lock:
            if not delivery.open:
                return
            digest = scatter([Region(address + header.SIZE, nbytes)], parts)
        _verify(client, key, ctypes.string_at(address, header.SIZE), nbytes, digest)


def read_own(client: Client, key: str, parts: Sequence[Region], place: Region) -> bool:
    """Read an extent that lies in memory of this process, without the library.

    Returns:
        Whether it worked; if not, the object is another one now, or elsewhere.

    """
    nbytes = total_bytes(parts)
    if client.own_memory is None or not client.own_memory.holds(place) or place.nbytes != header.SIZE + nbytes:
        return False
    digest = scatter([Region(place.address + header.SIZE, nbytes)], parts)
    return not header.fault(ctypes.string_at(place.address, header.SIZE), key, nbytes, digest)


def locate(client: Client, keys: Sequence[str]) -> list[Place | None]:
    """Where objects are. Readers' leases are taken on those that exist."""
    names = [name_of(key) for key in keys]
    places = _places(client, list(dict.fromkeys(names)))
    return [places.get(name) for name in names]


def write_record(client: Client, key: str, data: bytes, kept: Any) -> None:
    """Write or replace a record."""
    name = name_of(key)
    store = client.store
    with client.arena.lend(len(data)) as address:
        ctypes.memmove(address, data, len(data))

        def write() -> int:
            return int(store.upsert_from(name, address, len(data), kept))

        code = _persist(write)
        if code == errors.OK and client.offloads:
            # What replaces an object that is in a file, too, is never written to one (Mooncake 0.3.13) and lost with
            # its memory; a new object is. A file that is being written right now gets the same bytes.
            store.remove(name, True)
            code = _persist(write)
        if code == errors.NO_SPACE and store.get_size(name) < 0:
            raise PoolUnavailableError(f"put record {key}: no room for it, and the old one is gone")
        if code:
            raise _write_error(code, f"put record {key}")


def read_record(client: Client, key: str) -> bytes | None:
    """A record's bytes, perhaps torn."""
    name = name_of(key)
    size = RECORD_GUESS
    code = 0
    for _ in range(READ_ATTEMPTS):
        with client.arena.lend(size) as address:
            code = client.store.get_into(name, address, size)
            if code >= 0:
                return ctypes.string_at(address, code)
        if code == errors.INVALID:  # It may be larger.
            size = client.store.get_size(name)
            if size < 0:
                code = size
        if code == errors.NOT_READY:
            time.sleep(READ_PAUSE)
        elif code != errors.INVALID:
            break
    if code in errors.GONE:
        return None
    raise errors.error_of(code, f"get record {key}")


def remove(client: Client, keys: Sequence[str]) -> list[str]:
    """Remove objects; returns the keys of those that are still there."""
    names = [name_of(key) for key in keys]
    wanted = list(dict.fromkeys(names))
    codes = dict(zip(wanted, client.store.batch_remove(wanted), strict=True))
    left = {name: code for name, code in codes.items() if code not in (errors.OK, errors.MISSING)}
    if left and all(code not in errors.STILL_THERE for code in left.values()) and len(left) == len(codes):
        raise errors.error_of(next(iter(left.values())), f"remove {keys[0]}")
    return [key for key, name in zip(keys, names, strict=True) if name in left]


def _write_object(client: Client, key: str, parts: Sequence[Region], kept: Any) -> None:
    addresses, sizes = _lists(parts)
    store = client.store
    code = _persist(lambda: int(store.batch_put_from_multi_buffers([name_of(key)], addresses, sizes, kept)[0]))
    if code:
        raise _write_error(code, f"put {key}")


def _read_object(client: Client, key: str, parts: Sequence[Region]) -> None:
    name = name_of(key)
    addresses, sizes = _lists(parts)
    start = time.monotonic()
    code = client.store.batch_get_into_multi_buffers([name], addresses, sizes)[0]
    if code == errors.UNREACHABLE and time.monotonic() - start < AT_ONCE:
        # The connection to an owner of files that has restarted meanwhile; it is made anew.
        code = client.store.batch_get_into_multi_buffers([name], addresses, sizes)[0]
    expected = sum(sizes[0])
    if code == expected:
        return
    if code >= 0 or code in (errors.INVALID, errors.TRANSFER_FAILED):  # Also what another size looks like.
        size = client.store.get_size(name)
        if size >= 0 and size != expected:
            _reject(client, key, f"it has {size - header.SIZE} bytes instead of {expected - header.SIZE}")
        code = size if size < 0 else errors.TRANSFER_FAILED
    raise errors.error_of(code, f"get {key}")


def _verify(client: Client, key: str, head: bytes, nbytes: int, digest: int) -> None:
    reason = header.fault(head, key, nbytes, digest)
    if reason:
        _reject(client, key, reason)


def _reject(client: Client, key: str, reason: str) -> None:
    client.store.remove(name_of(key), True)
    raise ObjectCorruptError(f"get {key}: {reason}")


def _persist(write: Callable[[], int]) -> int:
    for pause in RETRY_PAUSES:
        code = write()
        if code not in errors.PASSING:
            return code
        time.sleep(pause)
    return write()


def _write_error(code: int, what: str) -> Exception:
    error = errors.error_of(code, what)
    return PoolUnavailableError(str(error)) if isinstance(error, ObjectMissingError) else error


def _places(client: Client, names: Sequence[str]) -> dict[str, Place]:
    """The best place of a copy, of those objects that exist."""
    codes = client.store.batch_is_exist(names)
    failed = next((code for code in codes if code < 0), 0)
    if failed:
        raise errors.error_of(failed, f"locate {names[0]}")
    found = [name for name, code in zip(names, codes, strict=True) if code]
    if client.remote or not found:  # A client process does not answer the second question.
        return dict.fromkeys(found, Place(Tier.DRAM))
    # Not asked for all names: it logs an error for each that does not exist.
    places = {}
    for name, replicas in client.store.batch_get_replica_desc(found).items():
        in_memory = [
            replica.get_memory_descriptor().buffer_descriptor for replica in replicas if replica.is_memory_replica()
        ]
        client.offloads |= len(in_memory) < len(replicas)
        if in_memory:
            own = client.own_memory and next(filter(None, map(client.own_memory.place, in_memory)), None)
            places[name] = Place(Tier.DRAM, own)
        elif replicas:
            places[name] = Place(Tier.SSD)
    return places


def _lists(parts: Sequence[Region]) -> tuple[list[list[int]], list[list[int]]]:
    parts = [part for part in parts if part.nbytes]
    return [[part.address for part in parts]], [[part.nbytes for part in parts]]


def doubles(parts: Sequence[Region]) -> list[int]:
    """Which parts lie in memory of others: bytes that nobody wants.

    They come into the same memory, one over the other, and could not be verified there.
    """
    doubles = []
    end = 0
    for index in sorted(range(len(parts)), key=parts.__getitem__):
        address, nbytes = parts[index]
        if address < end:
            doubles.append(index)
        else:
            end = address + nbytes
    return doubles
