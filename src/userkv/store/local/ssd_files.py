"""Objects as files.

Layout below the directory, where nothing else is touched::

    userkv.lock                     see directory.py
    users/{user}/{object}           an object of a user
    users/{user}/{object}.tmp       being written, or left behind by a crash; removed by the next start

``{user}`` and ``{object}`` are the BLAKE2b digests, 16 bytes in hex, of the eviction group and of the key, so a scan
of the names finds out who has what, and names of any length and kind are fine.

A file (``object_file.py``) gets its name when it is complete, by renaming, so whoever dies meanwhile leaves the old
file or the new one. Nothing waits for the device: what a power failure tears fails verification and is a miss.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from userkv.store.backend import Region
from userkv.store.local.object_file import DIGEST_BYTES, TRAILER_BYTES, read_object, write_object

UNIT = 4096
"""File systems hand out space in units of this."""

ENTRY_BYTES = 128
"""What a name takes in its directory, generously: directories are never quite full."""

USER_BYTES = UNIT + ENTRY_BYTES
"""What a user's directory takes, beside its files."""

_TEMPORARY = ".tmp"


def file_cost(nbytes: int) -> int:
    """Bytes of the budget that an object of ``nbytes`` takes."""
    return -(-(TRAILER_BYTES + nbytes) // UNIT) * UNIT + ENTRY_BYTES


class FoundUser(NamedTuple):
    """What a scan finds: a user, when it was used last (nanoseconds), its objects and their sizes, oldest first."""

    user: bytes
    used_at: int
    objects: list[tuple[bytes, int]]


class SsdFiles:
    """The files below one directory, which is locked by the caller.

    Thread-safe as long as no two threads write or remove the same object; reading meanwhile is fine.

    Raises:
        OSError: the directory cannot be used.

    """

    def __init__(self, directory: Path) -> None:
        self._root = directory / "users"
        self._root.mkdir(mode=0o700, exist_ok=True)

    def write(self, user: bytes, name: bytes, parts: Sequence[Region], checksum: int | None = None) -> int:
        """Write or replace an object.

        Args:
            user: the digest of the eviction group.
            name: the key's digest.
            parts: the bytes.
            checksum: of the bytes, if it is known.

        Returns:
            The checksum.

        Raises:
            OSError: nothing has changed.

        """
        path = self._path(user, name)
        descriptor = self._create(path + _TEMPORARY)
        try:
            try:
                checksum = write_object(descriptor, name, parts, checksum)
                _stamp(descriptor)
            finally:
                os.close(descriptor)
            os.rename(path + _TEMPORARY, path)
        except OSError:
            with suppress(OSError):
                os.unlink(path + _TEMPORARY)
            raise
        return checksum

    def read(self, user: bytes, name: bytes, parts: Sequence[Region]) -> int:
        """Read an object into ``parts``, in which the same memory may occur more than once.

        Returns:
            Its checksum, which is verified.

        Raises:
            FileNotFoundError: there is none.
            ObjectCorruptError: the file is not what was written, or the object has another size.
            OSError: it could not be read.

        """
        descriptor = os.open(self._path(user, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_object(descriptor, name, parts)
        finally:
            os.close(descriptor)

    def remove(self, user: bytes, name: bytes) -> bool:
        """Remove an object; ``False`` if that failed and it is still there."""
        try:
            os.unlink(self._path(user, name))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return True

    def remove_directory(self, user: bytes) -> None:
        """Remove a user's directory, if it is empty."""
        with suppress(OSError):
            os.rmdir(self._root / user.hex())

    def touch(self, user: bytes) -> None:
        """Remember across restarts that a user has just been used."""
        with suppress(OSError):
            _stamp(f"{self._root}/{user.hex()}")

    def scan(self) -> list[FoundUser]:
        """All users and objects, least recently used user first, by names and sizes alone. Removes temporary files.

        Raises:
            OSError: the directory cannot be read.

        """
        with os.scandir(self._root) as entries:
            found = [self._scan_user(entry) for entry in entries if _is_digest(entry.name)]
        return sorted((user for user in found if user.objects), key=lambda user: user.used_at)

    def _scan_user(self, directory: "os.DirEntry[str]") -> FoundUser:
        objects: list[tuple[int, bytes, int]] = []
        used_at = 0
        with suppress(OSError):
            used_at = directory.stat().st_mtime_ns
            with os.scandir(directory.path) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if _is_digest(entry.name) and status.st_size >= TRAILER_BYTES:
                        objects.append((status.st_mtime_ns, bytes.fromhex(entry.name), status.st_size - TRAILER_BYTES))
                    elif _is_digest(entry.name.removesuffix(_TEMPORARY)):
                        os.unlink(entry.path)
            if not objects:
                os.rmdir(directory.path)
        return FoundUser(
            bytes.fromhex(directory.name), used_at, [(name, nbytes) for _, name, nbytes in sorted(objects)]
        )

    def _path(self, user: bytes, name: bytes) -> str:
        return f"{self._root}/{user.hex()}/{name.hex()}"

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        for _ in range(3):  # The user's first file makes the directory, and whoever finds it empty may remove it again.
            with suppress(FileNotFoundError):
                return os.open(path, flags, 0o600)
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
        return os.open(path, flags, 0o600)


def _stamp(file: int | str) -> None:
    """Set a file's time of modification; the kernel's own clock for files is too coarse to order them."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _is_digest(name: str) -> bool:
    return len(name) == 2 * DIGEST_BYTES and set(name) <= set("0123456789abcdef")
