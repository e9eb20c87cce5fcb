"""The embedded backend for tests: small pages, and a look behind the scenes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.backends import filled
from userkv.cache.policies import LRU
from userkv.store.backend import Tier
from userkv.store.local import LocalBackend

PAGE = 4096


@contextmanager
def open_local(
    dram_bytes: int,
    directory: Path | None = None,
    ssd_bytes: int = 64 << 20,
    page_bytes: int = PAGE,
    policy: str = LRU,
) -> Iterator[LocalBackend]:
    """A backend, closed at the end."""
    backend = LocalBackend(dram_bytes, directory, ssd_bytes, page_bytes, policy)
    try:
        yield backend
    finally:
        backend.close()


def put(backend: LocalBackend, user: str, key: str, nbytes: int, seed: int = 0) -> Tier:
    """Put an extent with the contents of its size and seed."""
    memory = filled(nbytes, seed)
    return backend.put(user, key, memory.parts)


def contents(nbytes: int, seed: int = 0) -> bytes:
    """What :func:`put` puts."""
    return filled(nbytes, seed).data


def settle(backend: LocalBackend) -> None:
    """Wait until the writer has nothing to do."""
    deadline = time.monotonic() + 20
    while backend.counters()["queued_users"]:
        assert time.monotonic() < deadline, "the writer does not get done"
        time.sleep(0.001)


def files_of(directory: Path) -> list[Path]:
    """All objects' files."""
    return sorted(path for path in (directory / "users").glob("*/*") if path.is_file())


def disk_usage(directory: Path) -> int:
    """What the files and directories of users really take, in bytes."""
    return sum(path.lstat().st_blocks * 512 for path in (directory / "users").rglob("*"))
