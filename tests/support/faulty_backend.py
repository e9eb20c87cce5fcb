"""A backend that fails on demand, within the contract: for tests of everything that must survive a bad pool."""

import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from userkv.store.backend import PoolBackend, PoolUnavailableError, Region, StoreError, Tier, TierUsage

OPERATIONS = ("register", "put", "get", "locate", "put_record", "get_record", "remove", "usage")


@dataclass(frozen=True, slots=True)
class Raise:
    """The call does nothing and raises this error."""

    error: type[StoreError]


@dataclass(frozen=True, slots=True)
class Slow:
    """The call takes so many seconds longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """The call waits for :meth:`FaultyBackend.release`, then works; after ``seconds`` it ends as unavailable."""

    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Lose:
    """What ``put`` or ``put_record`` writes is gone at once, as if it had been evicted."""


@dataclass(frozen=True, slots=True)
class Tear:
    """``get_record`` returns a mixture: the first ``at`` bytes, and from there on those of the record before."""

    at: int = 40


Fault = Raise | Slow | Hang | Lose | Tear


@dataclass(frozen=True, slots=True)
class _Habit:
    fault: Fault
    probability: float


class FaultyBackend(PoolBackend):
    """Passes calls on to another backend, except for planned faults. Thread-safe.

    Args:
        backend: what does the work; closing this one closes it.
        seed: of the faults that happen with a probability.

    Attributes:
        calls: how often each operation was called.

    """

    def __init__(self, backend: PoolBackend, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self._backend = backend
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._planned: defaultdict[str, deque[Fault | None]] = defaultdict(deque)
        self._habits: dict[str, _Habit] = {}
        self._released = threading.Event()
        self._records: dict[str, tuple[bytes, bytes]] = {}

    def plan(self, operation: str, *faults: Fault | None) -> None:
        """What happens to the next calls of an operation, one after the other; ``None`` = nothing."""
        self._check(operation)
        with self._lock:
            self._planned[operation].extend(faults)

    def always(self, fault: Fault, *operations: str, probability: float = 1.0) -> None:
        """What happens to every call that has no plan, or to some; without operations, to all of them."""
        self._check(*operations)
        with self._lock:
            for operation in operations or OPERATIONS:
                self._habits[operation] = _Habit(fault, probability)

    def clear(self) -> None:
        """No more faults from now on; calls that hang go on."""
        with self._lock:
            self._planned.clear()
            self._habits.clear()
        self.release()

    def release(self) -> None:
        """Let all calls that hang go on."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()

    def register(self, regions: Sequence[Region]) -> None:
        self._meet("register")
        self._backend.register(regions)

    def count_request(self, user: str) -> None:
        self._backend.count_request(user)

    def put(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        if isinstance(self._meet("put"), Lose):
            return Tier.DRAM
        return self._backend.put(user, key, parts)

    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        self._meet("get")
        return self._backend.get(user, key, parts)

    def locate(self, user: str, keys: Sequence[str]) -> list[Tier | None]:
        self._meet("locate")
        return self._backend.locate(user, keys)

    def put_record(self, user: str, key: str, data: bytes) -> None:
        fault = self._meet("put_record")
        self._backend.put_record(user, key, data)
        with self._lock:
            before = self._records.get(key, (b"", b""))
            self._records[key] = (before[1], data)
        if isinstance(fault, Lose):
            self._backend.remove(user, [key])

    def get_record(self, user: str, key: str) -> bytes | None:
        fault = self._meet("get_record")
        data = self._backend.get_record(user, key)
        if data is None or not isinstance(fault, Tear):
            return data
        with self._lock:
            old = self._records.get(key, (b"", b""))[0] or bytes(byte ^ 0xFF for byte in data)
        return data[: fault.at] + old[fault.at : len(data)] + data[max(fault.at, len(old)) :]

    def remove(self, user: str, keys: Sequence[str]) -> list[str]:
        self._meet("remove")
        return self._backend.remove(user, keys)

    def usage(self) -> list[TierUsage]:
        self._meet("usage")
        return self._backend.usage()

    def close(self) -> None:
        self.clear()
        self._backend.close()

    def _meet(self, operation: str) -> Fault | None:
        """Do what the fault of this call is, if that can be done here; returns it."""
        with self._lock:
            self.calls[operation] += 1
            fault: Fault | None = None
            if self._planned[operation]:
                fault = self._planned[operation].popleft()
            elif operation in self._habits and self._random.random() < self._habits[operation].probability:
                fault = self._habits[operation].fault
            released = self._released
        match fault:
            case Raise(error):
                raise error(f"a fault was injected into {operation}")
            case Slow(seconds):
                time.sleep(seconds)
            case Hang(seconds):
                if not released.wait(seconds):
                    raise PoolUnavailableError(f"{operation} hung for {seconds} s, as it was told to")
        return fault

    @staticmethod
    def _check(*operations: str) -> None:
        for operation in operations:
            if operation not in OPERATIONS:
                raise ValueError(f"there is no operation {operation!r}")
