"""Pool backend over Mooncake Store.

An extent is one object: a header (``header.py``) and the KV. Mooncake gathers it straight from the engine's memory and
scatters it straight into it, or the backend does (``MooncakeConfig.staged``, ``own_memory.py``). A record is one object
that is replaced. Both belong to the user's eviction group.

How long calls take at most: those that move no KV, one second. Transfers are left after a time that grows with the
size. A put that was left may go on reading the source, which spoils an object that nobody will ask for. But a ``get``
straight into the engine's memory is never left: it first asks within a second where the object is, and then **waits
until the library returns**: 4 s if the owner of the memory freezes, 4.3 s if the master dies at that very moment.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolBackend,
    PoolFullError,
    PoolUnavailableError,
    Region,
    Tier,
    TierUsage,
)
from userkv.store.checksum import prepare
from userkv.store.mooncake import header, objects
from userkv.store.mooncake.calls import TimedCalls
from userkv.store.mooncake.config import LEAST_SEGMENT, MooncakeConfig
from userkv.store.mooncake.connection import Client, Connection
from userkv.store.mooncake.master import MasterStatus, ask_master
from userkv.store.mooncake.recent import Place, RecentPlaces
from userkv.store.regions import total_bytes

T = TypeVar("T")

CALL_SECONDS = 1.0
TRANSFER_SECONDS = 3.0
SLOWEST = 20e6
"""A transfer counts as failed after so many seconds, and one more for so many bytes."""
CALL_THREADS = 8
TRANSFER_THREADS = 4
USAGE_SECONDS = 1.0
"""How long the master's answer about usage counts as fresh."""
SEGMENTS_SECONDS = 10.0
"""And the one about segments."""


class MooncakeBackend(PoolBackend):
    """Users' objects in Mooncake Store.

    Without a master it starts nevertheless, answers that the pool is unavailable, and connects when there is one.

    Args:
        config: where the pool is.

    Raises:
        InvalidSettingError: it can never work like this.

    """

    def __init__(self, config: MooncakeConfig) -> None:
        prepare()
        self._config = config
        self._connection = Connection(config)
        self._calls = TimedCalls("userkv-mooncake-call", CALL_THREADS)
        self._transfers = TimedCalls("userkv-mooncake-transfer", TRANSFER_THREADS)
        self._staged = config.staged
        self._recent = RecentPlaces()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._status: tuple[float, MasterStatus] | None = None
        self._closed = False
        self._connection.try_now()

    def register(self, regions: Sequence[Region]) -> None:
        self._connection.register(regions)

    def put(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        self._check_size(key, total_bytes(parts))
        kept = objects.placement(user, self._config.replica_num)
        if self._staged:
            self._deliver(lambda client, it: objects.write_staged(client, key, parts, kept, it), parts, f"put {key}")
        else:
            self._deliver(lambda client, _: objects.write_extent(client, key, parts, kept), parts, f"put {key}")
        return Tier.DRAM

    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        place = self._recent.find(key) or self._locate([key])[0]
        if place is None:
            raise ObjectMissingError(f"get {key}: no such object")
        try:
            if place.region is not None:
                with self._connection.use() as client:
                    if objects.read_own(client, key, parts, place.region):
                        return place.tier
            if self._staged:
                self._deliver(lambda client, it: objects.read_staged(client, key, parts, it), parts, f"get {key}")
            else:
                with self._connection.use() as client:
                    objects.read_extent(client, key, parts)
        except (PoolUnavailableError, ObjectMissingError, ObjectCorruptError) as error:
            self._recent.forget()
            self._count("corrupt_objects", isinstance(error, ObjectCorruptError))
            raise
        return place.tier

    def locate(self, user: str, keys: Sequence[str]) -> list[Tier | None]:
        return [None if place is None else place.tier for place in self._locate(keys)] if keys else []

    def put_record(self, user: str, key: str, data: bytes) -> None:
        kept = objects.placement(user, self._config.replica_num)
        self._call(lambda client: objects.write_record(client, key, data, kept), f"put record {key}")

    def get_record(self, user: str, key: str) -> bytes | None:
        return self._call(lambda client: objects.read_record(client, key), f"get record {key}")

    def remove(self, user: str, keys: Sequence[str]) -> list[str]:
        if not keys:
            return []
        self._recent.note(keys, [None] * len(keys))
        return self._call(lambda client: objects.remove(client, keys), f"remove {keys[0]}")

    def usage(self) -> list[TierUsage]:
        if self._closed:
            raise PoolUnavailableError("the pool is closed")
        if not self._config.metrics_address:
            raise PoolUnavailableError("usage is not known without metrics_address, the host:port of the master's")
        return self._ask_master(USAGE_SECONDS).usage()

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self._closed = True
        self._calls.close()
        self._transfers.close()
        self._connection.close()

    def _locate(self, keys: Sequence[str]) -> list[Place | None]:
        places = self._call(lambda client: objects.locate(client, keys), f"locate {keys[0]}")
        self._recent.note(keys, places)
        return places

    def _call(self, call: Callable[[Client], T], what: str) -> T:
        """Run a call that moves no KV and touches no memory of the caller."""
        return self._run(self._calls, call, CALL_SECONDS, what)

    def _deliver(
        self, transfer: Callable[[Client, objects.Delivery], None], parts: Sequence[Region], what: str
    ) -> None:
        """Run a transfer that may be left; what it writes into the caller's memory, it writes before that."""
        delivery = objects.Delivery()
        try:
            seconds = TRANSFER_SECONDS + total_bytes(parts) / SLOWEST
            self._run(self._transfers, lambda client: transfer(client, delivery), seconds, what)
        finally:
            delivery.end()

    def _run(self, threads: TimedCalls, call: Callable[[Client], T], seconds: float, what: str) -> T:
        def connected() -> T:
            with self._connection.use() as client:
                return call(client)

        try:
            return threads.run(connected, seconds, what)
        except PoolUnavailableError:
            self._recent.forget()
            self._count("unavailable")
            raise

    def _check_size(self, key: str, nbytes: int) -> None:
        """Refuse an object that fits nowhere, before the master evicts others in vain for it."""
        if nbytes < LEAST_SEGMENT - header.SIZE or not self._config.metrics_address:
            return
        with contextlib.suppress(PoolUnavailableError):
            largest = self._ask_master(SEGMENTS_SECONDS).largest_segment
            if nbytes + header.SIZE > largest:
                raise PoolFullError(f"put {key}: {nbytes} bytes do not fit into any segment; the largest has {largest}")

    def _ask_master(self, fresh_seconds: float) -> MasterStatus:
        with self._lock:
            if self._status is None or time.monotonic() - self._status[0] > fresh_seconds:
                self._status = (time.monotonic(), ask_master(self._config.metrics_address))
            return self._status[1]

    def _count(self, name: str, happened: bool = True) -> None:
        with self._lock:
            self._counts[name] += happened
