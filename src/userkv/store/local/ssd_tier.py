"""The SSD tier: users' files inside their budget.

Whoever writes or removes a file claims it first, and whoever writes what a user has in memory claims the user, so that
it is written in the order of the puts: no record is ever there before the extents that it names.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolFullError,
    PoolUnavailableError,
    Region,
    StoreError,
)
from userkv.store.local.index import Entry, Index, User
from userkv.store.local.ssd_files import SsdFiles, file_cost
from userkv.store.regions import total_bytes

WHOLE_USER = b""
"""Claims the order of a user's writes, where an object's name claims its file."""


class SsdTier:
    """The files of an index's users. Thread-safe. Callers hold the users that they pass, and not the index's lock.

    Takes over what is there, as far as the budget allows.

    Raises:
        OSError: the directory cannot be read.

    """

    def __init__(self, index: Index, files: SsdFiles) -> None:
        self._index = index
        self._files = files
        self._claims: set[tuple[bytes, bytes]] = set()
        for found in files.scan():
            with index.changed:
                user = index.hold_name(found.user)
                for name, nbytes in found.objects:
                    user.entries[name] = Entry(name, nbytes, on_ssd=True)
                    index.count_file(user, nbytes)
                index.count_request(user.name)  # Once each, in the order of their uses, which so goes on to count.
                index.release(user)
        while index.ssd_used > index.ssd_budget and self.evict():
            pass

    @contextmanager
    def claim(self, user: User, name: bytes) -> Iterator[None]:
        """Have the right to write or remove a file, or to write a user's (:data:`WHOLE_USER`), alone."""
        claim = (user.name, name)
        changed = self._index.changed
        with changed:
            while claim in self._claims:
                changed.wait()
            self._claims.add(claim)
        try:
            yield
        finally:
            with changed:
                self._claims.remove(claim)
                changed.notify_all()

    def read(self, user: User, entry: Entry, parts: Sequence[Region]) -> int:
        """Read an object.

        Returns:
            Its checksum, which is verified.

        Raises:
            ObjectMissingError: it is gone.
            ObjectCorruptError: it failed verification.
            PoolUnavailableError: it could not be read.

        """
        try:
            checksum = self._files.read(user.name, entry.name, parts)
        except FileNotFoundError as error:
            raise ObjectMissingError("the object's file is gone") from error
        except ObjectCorruptError:
            raise
        except OSError as error:
            self._count("ssd_read_errors")
            raise PoolUnavailableError(f"reading from local_dir failed: {error}") from error
        self._files.touch(user.name)
        return checksum

    def flush(self, user: User) -> bool:
        """Write what a user has only in memory; ``False`` if not all of it could be written."""
        with self.claim(user, WHOLE_USER):
            return self._flush(user)

    def put(self, user: User, name: bytes, parts: Sequence[Region]) -> None:
        """Write or replace an object, after what the user has in memory.

        Raises:
            PoolFullError: there is no room; nothing has changed.
            PoolUnavailableError: the device fails; nothing has changed.

        """
        nbytes = total_bytes(parts)
        with self.claim(user, WHOLE_USER):
            if not self._flush(user):
                raise PoolFullError("what the user has in memory cannot be written to local_dir")
            with self.claim(user, name):
                checksum = self._write(user, name, parts, None)
                with self._index.changed:
                    old = user.entries.pop(name, None)
                    if old is not None:
                        self._index.forget_block(user, old)
                        if old.on_ssd:
                            self._index.forget_file(user, old.nbytes)
                    user.entries[name] = Entry(name, nbytes, checksum, on_ssd=True)

    def remove(self, user: User, entry: Entry) -> bool:
        """Remove a claimed object's file; ``False`` if that failed."""
        if not self._files.remove(user.name, entry.name):
            self._count("ssd_write_errors")
            return False
        with self._index.changed:
            entry.on_ssd = False
        self._forget_file(user, entry.nbytes)
        return True

    def drop(self, user: User) -> int:
        """Remove a user's files, the record before the extents; what cannot be removed stays. Returns bytes freed."""
        with self._index.changed:
            entries = [entry for entry in reversed(user.entries.values()) if entry.on_ssd]
        freed = 0
        for entry in entries:
            with self.claim(user, entry.name):
                with self._index.changed:
                    if user.entries.get(entry.name) is not entry or not entry.on_ssd:
                        continue
                if not self.remove(user, entry):
                    continue
                freed += file_cost(entry.nbytes)
                with self._index.changed:
                    if entry.block is None:
                        del user.entries[entry.name]
        return freed

    def evict(self) -> int:
        """Remove the files of the user who goes next. Returns the bytes freed: 0 if nobody can go."""
        with self._index.changed:
            victim = self._index.ssd_victim()
            if victim is None:
                return 0
            self._index.hold(victim)
            self._index.counts["ssd_evictions"] += 1
        freed = self.drop(victim)
        with self._index.changed:
            self._index.release(victim)
        return freed

    def touch(self, user: User) -> None:
        """Remember across restarts that a user has just been used."""
        self._files.touch(user.name)

    def _flush(self, user: User) -> bool:
        with self._index.changed:
            self._index.unwritten -= user.unwritten
            user.unwritten = 0
            entries = [entry for entry in user.entries.values() if not entry.on_ssd]
        return all(self._write_entry(user, entry) for entry in entries)

    def _write_entry(self, user: User, entry: Entry) -> bool:
        with self.claim(user, entry.name):
            with self._index.changed:
                block = entry.block
                if user.entries.get(entry.name) is not entry or block is None:
                    return True  # Removed or replaced meanwhile; what replaced it is written later.
                block.readers += 1
            try:
                self._write(user, entry.name, block.regions, entry.checksum)
            except StoreError:
                return False
            finally:
                with self._index.changed:
                    self._index.end_read(user, block)
            with self._index.changed:
                entry.on_ssd = True
        return True

    def _write(self, user: User, name: bytes, parts: Sequence[Region], checksum: int | None) -> int:
        nbytes = total_bytes(parts)
        self._reserve(user, nbytes)
        try:
            return self._try_to_write(user, name, parts, checksum)
        except PoolFullError:  # Others have filled the device: make do with less than the budget.
            freed = self.evict()
            while freed < file_cost(nbytes) and (more := self.evict()):
                freed += more
            if not freed:
                raise
        self._reserve(user, nbytes)
        return self._try_to_write(user, name, parts, checksum)

    def _try_to_write(self, user: User, name: bytes, parts: Sequence[Region], checksum: int | None) -> int:
        """Write a file that is counted already, and count it no more if that fails."""
        try:
            return self._files.write(user.name, name, parts, checksum)
        except OSError as error:
            self._count("ssd_write_errors")
            self._forget_file(user, total_bytes(parts))
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise PoolFullError(f"the device of local_dir is full: {error}") from error
            raise PoolUnavailableError(f"writing to local_dir failed: {error}") from error

    def _reserve(self, user: User, nbytes: int) -> None:
        """Count a file that is about to be written, after making room in the budget.

        Raises:
            PoolFullError: there is no room, although those who may be evicted were.

        """
        index = self._index
        while True:
            with index.changed:
                cost = index.file_cost(user, nbytes)
                if user.ssd + cost > index.ssd_budget:
                    raise PoolFullError("the user does not fit into local_ssd_bytes: set more")
                if index.ssd_used + cost <= index.ssd_budget:
                    index.count_file(user, nbytes)
                    return
            if not self.evict():
                raise PoolFullError("local_ssd_bytes is full of users that are in use: set more")

    def _forget_file(self, user: User, nbytes: int) -> None:
        """A file is gone, and with the last one the user's directory."""
        with self._index.changed:
            self._index.forget_file(user, nbytes)
            last = not user.files
        if last:
            self._files.remove_directory(user.name)

    def _count(self, what: str) -> None:
        with self._index.changed:
            self._index.counts[what] += 1
