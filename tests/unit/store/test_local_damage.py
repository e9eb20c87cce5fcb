"""The embedded backend when files are damaged, or its process is killed at any time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.backends import Memory, read
from tests.support.local import contents, disk_usage, files_of, open_local, put
from userkv.core.sizes import MIB
from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    Tier,
)
from userkv.store.local import LocalBackend
from userkv.store.local.object_file import TRAILER_BYTES

SIZE = 700_000


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "cut off": lambda path, other: os.truncate(path, TRAILER_BYTES + SIZE - 1),
    "cut to the trailer's size": lambda path, other: os.truncate(path, TRAILER_BYTES),
    "empty": lambda path, other: os.truncate(path, 0),
    "longer": lambda path, other: os.truncate(path, TRAILER_BYTES + SIZE + 1),
    "bit in the object": lambda path, other: flip(path, TRAILER_BYTES + SIZE // 2),
    "last bit": lambda path, other: flip(path, -1),
    "zeros, as after a power failure": lambda path, other: path.write_bytes(bytes(TRAILER_BYTES + SIZE)),
    "magic": lambda path, other: flip(path, SIZE + 0),
    "version": lambda path, other: flip(path, SIZE + 8),
    "digest": lambda path, other: flip(path, SIZE + 20),
    "size": lambda path, other: flip(path, SIZE + 33),
    "checksum": lambda path, other: flip(path, SIZE + 41),
    "trailer's checksum": lambda path, other: flip(path, SIZE + 60),
    "swapped with another": swap,
    "another's": lambda path, other: shutil.copy(other, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("restart", [True, False], ids=["before the start", "while running"])
def test_a_damaged_file_is_never_served(tmp_path: Path, damage: str, restart: bool) -> None:
    with open_local(0, tmp_path) as backend:
        put(backend, "u", "k", SIZE)
        path = files_of(tmp_path)[0]
        put(backend, "u", "other", SIZE, seed=1)
        other = next(file for file in files_of(tmp_path) if file != path)
        if not restart:
            DAMAGES[damage](path, other)
            check_damaged(backend, path)
    if restart:
        DAMAGES[damage](path, other)
        with open_local(0, tmp_path) as backend:
            check_damaged(backend, path)


def check_damaged(backend: LocalBackend, path: Path) -> None:
    with pytest.raises((ObjectCorruptError, ObjectMissingError)):
        read(backend, "u", "k", SIZE)
    with pytest.raises(ObjectMissingError):
        read(backend, "u", "k", SIZE)
    assert not path.exists()
    assert backend.locate("u", ["k"]) == [None]
    assert put(backend, "u", "k again", SIZE) is Tier.SSD
    assert read(backend, "u", "k again", SIZE) == contents(SIZE)
    backend._index.check_integrity()


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    with open_local(0, tmp_path) as backend:
        backend.put_record("u", "record", b"r" * 1024)
        flip(files_of(tmp_path)[0], -1)
        assert backend.get_record("u", "record") is None
        assert backend.counters()["corrupt_objects"] == 1
        assert files_of(tmp_path) == []


def test_memory_that_was_overwritten_is_not_served() -> None:
    with open_local(MIB) as backend:
        put(backend, "u", "k", SIZE)
        user = backend._index.find(next(iter(backend._index._users)))
        assert user is not None
        (entry,) = user.entries.values()
        assert entry.block is not None
        entry.checksum = 1
        with pytest.raises(ObjectCorruptError):
            read(backend, "u", "k", SIZE)
        with pytest.raises(ObjectMissingError):
            read(backend, "u", "k", SIZE)
        backend._index.check_integrity()


WRITER = """
import sys
from pathlib import Path
from tests.support.local import open_local, put
number = int(sys.argv[2])
with open_local(1 << 20, Path(sys.argv[1]), 4 << 30) as backend:
    while True:
        user = f"u{number % 50}"
        for key in (2 * number, 2 * number + 1):
            put(backend, user, f"{user}@{key}", 100_000 + key % 7, key)
        backend.put_record(user, "record", f"{user} {number}".encode())
        print(number, flush=True)
        number += 1
"""


def test_killed_at_any_time(tmp_path: Path) -> None:
    """What a record names was written before it, so it is there and right; only the last moments are lost."""
    number = 0
    for pause in (0.15, 0.3, 0.05):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
            *_, last = [str(number), *process.stdout]
        number = int(last) + 2  # The next one may be half done, and a key is never used twice.
        with open_local(0, tmp_path, 4 << 30) as backend:
            found = [backend.get_record(f"u{user}", "record") for user in range(50)]
            newest = -1
            for record in filter(None, found):
                user, put_number = record.decode().split()
                newest = max(newest, int(put_number))
                for key in (2 * int(put_number), 2 * int(put_number) + 1):
                    size = 100_000 + key % 7
                    memory = Memory(size)
                    backend.get(user, f"{user}@{key}", memory.parts)
                    assert memory.data == contents(size, key)
            assert newest >= int(last) - 20
            backend._index.check_integrity()
            assert disk_usage(tmp_path) <= backend.usage()[0].used
        assert not list(tmp_path.rglob("*.tmp"))
