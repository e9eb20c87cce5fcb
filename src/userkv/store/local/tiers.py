"""How objects move: into memory, to the SSD, back, and out.

One lock (``Index.changed``) guards the index. Nobody copies or does I/O under it: whoever uses an object's memory
counts as its reader, and whoever works for a user holds it, so that it is not evicted meanwhile.

When an object is replaced, the old one's file goes at once: what a crash forgets is a miss, never a deleted user.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolFullError,
    PoolUnavailableError,
    Region,
    StoreError,
    Tier,
)
from userkv.store.local.arena import Block
from userkv.store.local.index import Entry, Index, User
from userkv.store.local.ssd_tier import SsdTier
from userkv.store.regions import gather, region_of, scatter, total_bytes

PATIENCE = 1.0
"""Seconds to wait for room in memory that operations in progress take."""

_MOST_TRIES = 3
"""How often a record is looked for that others replace, or remove, between looking and reading."""


class Tiers:
    """Memory and files of one pool. Thread-safe. Callers hold the users that they pass, and not the index's lock.

    Args:
        index: the users.
        ssd: their files; ``None`` if there is no SSD tier.

    """

    def __init__(self, index: Index, ssd: SsdTier | None) -> None:
        self._index = index
        self._ssd = ssd
        self._waiting = 0

    @contextmanager
    def holding(self, user: User) -> Iterator[None]:
        """Hold a user."""
        with self._index.changed:
            self._index.hold(user)
        try:
            yield
        finally:
            with self._index.changed:
                self._index.release(user)

    def put(self, user: User, name: bytes, parts: Sequence[Region]) -> Tier:
        """Write or replace an object; what is in memory then remains to be written to the SSD.

        Raises:
            PoolFullError: there is no room; nothing has changed.
            PoolUnavailableError: the SSD fails; nothing has changed.

        """
        nbytes = total_bytes(parts)
        block = self._room(user, nbytes)
        if block is None:
            if self._ssd is None:
                raise PoolFullError("the object does not fit into local_dram_bytes beside what is in use: set more")
            self._ssd.put(user, name, parts)
            return Tier.SSD
        entry = Entry(name, nbytes, gather(parts, block.regions), block)
        if not self.replace(user, name, entry):
            raise PoolUnavailableError("the file with what the object was before cannot be removed from local_dir")
        if self._ssd is not None:
            with self._index.changed:
                user.unwritten += nbytes
                self._index.unwritten += nbytes
        return Tier.DRAM

    def get(self, user: User, name: bytes, parts: Sequence[Region]) -> Tier:
        """Read an object into ``parts``; one that fails verification, or has another size, is removed.

        Raises:
            ObjectMissingError: there is none (any more).
            ObjectCorruptError: it failed verification or has another size.
            PoolUnavailableError: it could not be read.

        """
        entry, block = self._open(user, name)
        if entry is None:
            raise ObjectMissingError("there is no such object")
        self._load(user, entry, block, parts)
        return Tier.SSD if block is None else Tier.DRAM

    def get_bytes(self, user: User, name: bytes) -> bytes | None:
        """A small object's bytes; ``None`` if there is none that passes verification.

        Raises:
            PoolUnavailableError: it could not be read.

        """
        for _ in range(_MOST_TRIES):
            entry, block = self._open(user, name)
            if entry is None:
                return None
            data = bytearray(entry.nbytes)
            with suppress(ObjectMissingError, ObjectCorruptError):
                self._load(user, entry, block, (region_of(data),))
                return bytes(data)
        return None

    def locate(self, user: User, names: Sequence[bytes]) -> list[Tier | None]:
        """Where objects lie, the faster place of two."""
        with self._index.changed:
            entries = [user.entries.get(name) for name in names]
            return [None if e is None else Tier.DRAM if e.block is not None else Tier.SSD for e in entries]

    def replace(self, user: User, name: bytes, new: Entry | None, only: Entry | None = None) -> bool:
        """Put an object in memory, or nothing, in the place of what is there (of ``only``, if it is given).

        Returns:
            Whether that is so now. If the old file cannot be removed, the old object is still there.

        """
        with self._ssd.claim(user, name) if self._ssd is not None else nullcontext():
            with self._index.changed:
                old = user.entries.get(name)
                if only is not None and old is not only:
                    return False
                user.entries.pop(name, None)
                if new is not None:
                    user.entries[name] = new
                if old is None:
                    return True
                self._index.forget_block(user, old)
            if self._ssd is None or not old.on_ssd or self._ssd.remove(user, old):
                return True
            with self._index.changed:
                user.entries[name] = old
                if new is not None:
                    self._index.forget_block(user, new)
            return False

    def promote(self, user: User) -> None:
        """Read a user's objects into memory, if all of them fit."""
        arena = self._index.arena
        with self._index.changed:
            missing = [entry for entry in user.entries.values() if entry.block is None]
            if user.dram + sum(arena.cost(entry.nbytes) for entry in missing) > arena.budget:
                return
        for entry in missing:
            block = self._room(user, entry.nbytes)
            if block is None:
                return
            checksum = None
            with suppress(StoreError):
                checksum = self._load(user, entry, None, block.regions)
            with self._index.changed:
                if checksum is None or user.entries.get(entry.name) is not entry or entry.block is not None:
                    self._index.free(user, block)
                else:
                    entry.block, entry.checksum = block, checksum
                    self._index.counts["promotions"] += 1

    def empty_dram(self, deadline: float) -> None:
        """Write all users to the SSD and forget them, in the order of eviction, until ``deadline`` (monotonic)."""
        while time.monotonic() < deadline:
            with self._index.changed:
                user = self._index.dram_victim()
                if user is None:
                    return
                self._index.hold(user)
            self._evict(user)
            if self._ssd is not None:
                self._ssd.touch(user)

    def _open(self, user: User, name: bytes) -> tuple[Entry | None, Block | None]:
        """What there is, and its memory, if it is there, with the caller as a reader (:meth:`_load` ends that)."""
        with self._index.changed:
            entry = user.entries.get(name)
            if entry is None or entry.block is None:
                return entry, None
            entry.block.readers += 1
            return entry, entry.block

    def _load(self, user: User, entry: Entry, block: Block | None, parts: Sequence[Region]) -> int:
        """Copy an object from memory, or from its file, to ``parts``; see :meth:`get`. Returns its checksum."""
        try:
            if entry.nbytes != (nbytes := total_bytes(parts)):
                raise ObjectCorruptError(f"the object has {entry.nbytes} bytes, not {nbytes}")
            if block is not None:
                checksum = scatter(block.regions, parts)
                if checksum != entry.checksum:
                    raise ObjectCorruptError("the object's memory was overwritten")
                return checksum
            assert self._ssd is not None
            return self._ssd.read(user, entry, parts)
        except ObjectMissingError:
            self.replace(user, entry.name, None, only=entry)
            raise
        except ObjectCorruptError:
            if not self.replace(user, entry.name, None, only=entry):
                raise ObjectMissingError("the object was replaced or removed meanwhile") from None
            with self._index.changed:
                self._index.counts["corrupt_objects"] += 1
            raise
        finally:
            if block is not None:
                with self._index.changed:
                    self._index.end_read(user, block)

    def _room(self, user: User, nbytes: int) -> Block | None:
        """Memory for an object, taken from other users if need be; ``None`` if that is not enough."""
        index = self._index
        deadline = time.monotonic() + PATIENCE
        while True:
            with index.changed:
                if user.dram + index.arena.cost(nbytes) > index.arena.budget:
                    return None
                block = index.allocate(user, nbytes)
                if block is not None:
                    return block
                victim = index.dram_victim()
                if victim is None:
                    if not self._wait(deadline):
                        return None
                    continue
                index.hold(victim)
            self._evict(victim)

    def _wait(self, deadline: float) -> bool:
        """Wait for others to let go of users; ``False`` if that is in vain. The lock and one hold are the caller's."""
        if self._index.holds <= self._waiting + 1:  # Whoever holds a user waits, too.
            return False
        self._waiting += 1
        try:
            return self._index.changed.wait(deadline - time.monotonic())
        finally:
            self._waiting -= 1

    def _evict(self, victim: User) -> None:
        """Write a user to the SSD and forget it in memory, unless somebody uses it by then. Ends the caller's hold."""
        written = self._ssd is not None and self._ssd.flush(victim)
        with self._index.changed:
            put_meanwhile = written and not all(entry.on_ssd for entry in victim.entries.values())
            evicted = victim.holds == 1 and not put_meanwhile
            if evicted:
                self._index.counts["dram_evictions"] += 1
                for entry in list(victim.entries.values()):
                    self._index.forget_block(victim, entry)
                    if not entry.on_ssd:
                        del victim.entries[entry.name]
        if evicted and not written and self._ssd is not None:
            self._ssd.drop(victim)  # A part of a user is of no use.
        with self._index.changed:
            self._index.release(victim)
