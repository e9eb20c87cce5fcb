"""The backend: the pool's contract over host memory and a directory of this process's own.

What is put goes to memory and, soon after, to the SSD; what is read from the SSD comes back to memory. Whole users
leave memory for the SSD, least recently used first, and the last tier for good, in the order of a policy. Objects in
both tiers count in both budgets.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from userkv.cache.policies import LRU
from userkv.core.errors import InvalidOptionError
from userkv.store.backend import PoolBackend, PoolUnavailableError, Region, Tier, TierUsage
from userkv.store.checksum import prepare
from userkv.store.local.arena import PAGE, Arena
from userkv.store.local.directory import DirectoryLock
from userkv.store.local.index import Index, User
from userkv.store.local.object_file import DIGEST_BYTES
from userkv.store.local.ssd_files import SsdFiles
from userkv.store.local.ssd_tier import SsdTier
from userkv.store.local.tiers import Tiers
from userkv.store.local.writer import Writer
from userkv.store.regions import region_of

CLOSE_SECONDS = 10.0
"""How long :meth:`LocalBackend.close` writes what is only in memory; ``serving/launch_plan.py`` says why no longer."""

PARALLEL_GETS = 2
"""One verifies what it has read while the other reads, and a disk has more than one request to work on."""

COUNTERS = (
    "dram_evictions",
    "ssd_evictions",
    "promotions",
    "ssd_write_errors",
    "ssd_read_errors",
    "corrupt_objects",
)


class LocalBackend(PoolBackend):
    """A pool of one process. Threads: it has one of its own if there is a directory.

    Args:
        dram_bytes: budget in memory; 0 for none. Memory is taken when it is used first, and kept.
        directory: for the SSD tier, for this process alone; ``None`` for none. What it holds from before is taken over.
        ssd_bytes: budget below the directory.
        page_bytes: see ``arena.py``.
        policy: who leaves the last tier first (``core/policies``). Those that count requests know of them by
            :meth:`count_request`.

    Raises:
        InvalidOptionError: the directory is in use or cannot be used, or there is not so much memory.

    """

    def __init__(
        self, dram_bytes: int, directory: Path | None, ssd_bytes: int, page_bytes: int = PAGE, policy: str = LRU
    ) -> None:
        if dram_bytes < page_bytes and (directory is None or dram_bytes):
            raise InvalidOptionError(
                "local_dram_bytes",
                f"is {dram_bytes}: set at least {page_bytes}, or 0 with an SSD tier to use no memory",
            )
        prepare()
        self._dram_bytes = dram_bytes
        self._index = Index(Arena(dram_bytes, page_bytes), ssd_bytes if directory is not None else 0, policy)
        self._changed = self._index.changed
        self._running = 0
        self._closed = False
        self._lock: DirectoryLock | None = None
        self._writer: Writer | None = None
        ssd = None
        if directory is not None:
            self._lock = DirectoryLock(directory)
            try:
                ssd = SsdTier(self._index, SsdFiles(directory))
            except OSError as error:
                self._lock.release()
                raise InvalidOptionError(
                    "local_dir", f"{str(directory)!r} cannot be read ({error.strerror}): name another directory"
                ) from error
        self._tiers = Tiers(self._index, ssd)
        if ssd is not None:
            # A quarter of the memory is what a burst may fill before it runs at the speed of the SSD.
            self._writer = Writer(self._index, self._tiers, ssd, dram_bytes // 4)

    @property
    def parallel_gets(self) -> int:
        return PARALLEL_GETS

    def count_request(self, user: str) -> None:
        with self._changed:
            self._index.count_request(_digest(user))

    def put(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        with self._operation(user) as held:
            tier = self._tiers.put(held, _digest(key), parts)
            if tier is Tier.DRAM and self._writer is not None:
                self._writer.write_soon(held)
            return tier

    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        with self._operation(user) as held:
            tier = self._tiers.get(held, _digest(key), parts)
            if tier is Tier.SSD and self._writer is not None and self._dram_bytes:
                self._writer.promote_soon(held)
            return tier

    def locate(self, user: str, keys: Sequence[str]) -> list[Tier | None]:
        with self._operation(user) as held:
            return self._tiers.locate(held, [_digest(key) for key in keys])

    def put_record(self, user: str, key: str, data: bytes) -> None:
        memory = bytearray(data)  # Only what is writable tells its address.
        self.put(user, key, (region_of(memory),))

    def get_record(self, user: str, key: str) -> bytes | None:
        with self._operation(user) as held:
            return self._tiers.get_bytes(held, _digest(key))

    def remove(self, user: str, keys: Sequence[str]) -> list[str]:
        with self._operation(user) as held:
            return [key for key in keys if not self._tiers.replace(held, _digest(key), None)]

    def usage(self) -> list[TierUsage]:
        with self._changed:
            self._check_open()
            usage = [TierUsage(Tier.DRAM, self._index.arena.used, self._dram_bytes)] if self._dram_bytes else []
            if self._writer is not None:
                usage.append(TierUsage(Tier.SSD, self._index.ssd_used, self._index.ssd_budget))
            return usage

    def counters(self) -> dict[str, int]:
        """What has happened so far (:data:`COUNTERS`), and what is: users, those of them who wait to be written or read
        back, and the bytes that wait to be written.
        """
        with self._changed:
            counts = {name: self._index.counts[name] for name in COUNTERS}
            counts |= {"users": len(self._index), "unwritten_bytes": self._index.unwritten}
        counts["queued_users"] = self._writer.queued_users if self._writer is not None else 0
        return counts

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        with self._changed:
            if self._closed:
                return
            self._closed = True
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            ended = not self._running
        if self._writer is not None:
            ended = self._writer.close(deadline - time.monotonic()) and ended
        if not ended:
            return  # Somebody hangs in the kernel, with our memory or files: they go when the process does.
        if self._writer is not None:
            self._tiers.empty_dram(deadline)
        if self._lock is not None:
            self._lock.release()
        self._index.arena.close()

    @contextmanager
    def _operation(self, user: str) -> Iterator[User]:
        """Hold a user for an operation that :meth:`close` waits for."""
        name = _digest(user)
        with self._changed:
            self._check_open()
            self._running += 1
            held = self._index.hold_name(name)
        try:
            yield held
        finally:
            with self._changed:
                self._index.release(held)
                self._running -= 1
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolUnavailableError("the pool is closed")


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
