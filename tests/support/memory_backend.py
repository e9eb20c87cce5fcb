"""A pool in a dictionary, for tests: keeps the contract, never runs out of room, evicts only when told to."""

import ctypes
import threading
from collections.abc import Sequence

from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolBackend,
    PoolUnavailableError,
    Region,
    Tier,
    TierUsage,
)


class MemoryBackend(PoolBackend):
    """Objects in a dictionary. Several stores may share one, as workers and engines share a cluster's pool."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.owner: dict[str, str] = {}
        self.on_ssd: set[str] = set()
        self.leased: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        self._check_open()
        with self._lock:
            assert key not in self.objects, "a key is written twice"
            self.objects[key] = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in parts)
            self.owner[key] = user
        return Tier.DRAM

    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        self._check_open()
        with self._lock:
            data = self.objects.get(key)
        if data is None or self.owner[key] != user:
            raise ObjectMissingError(f"{key} does not exist")
        if len(data) != sum(nbytes for _, nbytes in parts):
            raise ObjectCorruptError(f"{key} has another size")
        start = 0
        for address, nbytes in parts:
            ctypes.memmove(address, data[start : start + nbytes], nbytes)
            start += nbytes
        return self._tier(key)

    def locate(self, user: str, keys: Sequence[str]) -> list[Tier | None]:
        self._check_open()
        with self._lock:
            return [self._tier(key) if key in self.objects else None for key in keys]

    def put_record(self, user: str, key: str, data: bytes) -> None:
        self._check_open()
        with self._lock:
            self.objects[key] = data
            self.owner[key] = user

    def get_record(self, user: str, key: str) -> bytes | None:
        self._check_open()
        with self._lock:
            return self.objects.get(key)

    def remove(self, user: str, keys: Sequence[str]) -> list[str]:
        self._check_open()
        with self._lock:
            for key in set(keys) - self.leased:
                self.objects.pop(key, None)
            return [key for key in keys if key in self.objects]

    def usage(self) -> list[TierUsage]:
        self._check_open()
        return [TierUsage(Tier.DRAM, sum(map(len, self.objects.values())), 0)]

    def close(self) -> None:
        self._closed = True

    def evict(self, user: str) -> None:
        """A user goes, whole."""
        with self._lock:
            for key in [key for key in self.objects if self.owner[key] == user]:
                del self.objects[key]

    def _tier(self, key: str) -> Tier:
        return Tier.SSD if key in self.on_ssd else Tier.DRAM

    def _check_open(self) -> None:
        if self._closed:
            raise PoolUnavailableError("the pool is closed")
