"""The breaker around a backend, and the backend that fails on demand with which it is tested."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from tests.support.faulty_backend import OPERATIONS, FaultyBackend, Hang, Lose, Raise, Slow, Tear
from tests.support.memory_backend import MemoryBackend
from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolBackend,
    PoolFullError,
    PoolUnavailableError,
    Region,
    StoreError,
    Tier,
)
from userkv.store.breaker import CircuitBreaker
from userkv.store.guarded import GuardedBackend

MEMORY = ctypes.create_string_buffer(b"0123456789abcdef", 16)
PARTS = [Region(ctypes.addressof(MEMORY), 10), Region(ctypes.addressof(MEMORY) + 10, 6)]
CALLS: dict[str, Callable[[PoolBackend], object]] = {
    "register": lambda pool: pool.register(PARTS),
    "put": lambda pool: pool.put("u", "new", PARTS),
    "get": lambda pool: pool.get("u", "old", PARTS),
    "locate": lambda pool: pool.locate("u", ["old", "missing"]),
    "put_record": lambda pool: pool.put_record("u", "r2", b"2"),
    "get_record": lambda pool: pool.get_record("u", "r"),
    "remove": lambda pool: pool.remove("u", ["old"]),
    "usage": lambda pool: pool.usage(),
}
RESULTS = [None, Tier.DRAM, Tier.DRAM, [Tier.DRAM, None], None, b"1", []]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A pool with one extent and one record, which can fail, behind a breaker."""

    def __init__(self) -> None:
        memory = MemoryBackend()
        memory.put("u", "old", PARTS)
        memory.put_record("u", "r", b"1")
        self.clock = Clock()
        self.faulty = FaultyBackend(memory)
        self.breaker = CircuitBreaker(failures=2, first_pause=1.0, clock=self.clock)
        self.guarded = GuardedBackend(self.faulty, self.breaker)

    def open(self) -> None:
        self.faulty.always(Raise(PoolUnavailableError))
        for _ in range(2):
            with pytest.raises(PoolUnavailableError, match="injected"):
                self.guarded.locate("u", [])
        assert self.breaker.state == "open"


def test_calls_are_passed_on() -> None:
    assert [call(Bench().guarded) for call in CALLS.values()][:-1] == RESULTS
    assert [call(Bench().faulty) for call in CALLS.values()][:-1] == RESULTS


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "usage"])
def test_while_it_is_open_no_call_reaches_the_pool(operation: str) -> None:
    bench = Bench()
    bench.open()
    bench.faulty.clear()
    with pytest.raises(PoolUnavailableError, match="breaker is open"):
        CALLS[operation](bench.guarded)
    assert bench.faulty.calls == {"locate": 2}
    bench.clock.now = 1.0
    CALLS[operation](bench.guarded)
    assert bench.breaker.state == "closed"


@pytest.mark.parametrize("error", [ObjectMissingError, ObjectCorruptError, PoolFullError])
def test_answers_that_are_errors_are_no_failures(error: type[StoreError]) -> None:
    bench = Bench()
    bench.faulty.always(Raise(error), "get")
    bench.faulty.always(Raise(PoolUnavailableError), "locate")
    for _ in range(3):
        with pytest.raises(PoolUnavailableError, match="injected"):
            bench.guarded.locate("u", [])
        with pytest.raises(error, match="injected"):
            bench.guarded.get("u", "old", PARTS)
    assert bench.breaker.opened == 0


def test_usage_and_closing_pass_through() -> None:
    bench = Bench()
    bench.open()
    bench.faulty.clear()
    assert bench.guarded.usage()[0].used == 17
    bench.guarded.close()
    bench.guarded.close()
    with pytest.raises(PoolUnavailableError, match="closed"):
        bench.faulty.get_record("u", "r")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_faults_can_be_planned_for_every_operation(operation: str) -> None:
    faulty = Bench().faulty
    faulty.plan(operation, None, Raise(PoolFullError), Raise(PoolUnavailableError))
    CALLS[operation](faulty)
    for error in (PoolFullError, PoolUnavailableError):
        with pytest.raises(error, match=f"injected into {operation}"):
            CALLS[operation](faulty)
    if operation not in ("put", "get"):
        CALLS[operation](faulty)
    assert faulty.calls[operation] >= 3


def test_operations_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="there is no operation 'read'"):
        Bench().faulty.plan("read", Lose())
    with pytest.raises(ValueError, match="there is no operation 'read'"):
        Bench().faulty.always(Lose(), "read")


def test_faults_with_a_probability_are_the_same_every_time() -> None:
    def failures() -> list[int]:
        faulty = FaultyBackend(MemoryBackend(), seed=3)
        faulty.always(Raise(PoolUnavailableError), "locate", probability=0.5)
        failed = []
        for number in range(50):
            try:
                faulty.locate("u", [])
            except PoolUnavailableError:
                failed.append(number)
        return failed

    assert failures() == failures()
    assert 10 < len(failures()) < 40


def test_what_is_lost_is_gone() -> None:
    faulty = Bench().faulty
    faulty.plan("put", Lose())
    assert faulty.put("u", "new", PARTS) == Tier.DRAM
    assert faulty.locate("u", ["new"]) == [None]
    faulty.plan("put_record", Lose())
    faulty.put_record("u", "r", b"2")
    assert faulty.get_record("u", "r") is None


def test_torn_records() -> None:
    faulty = Bench().faulty
    faulty.always(Tear(2), "get_record")
    assert faulty.get_record("u", "missing") is None
    faulty.put_record("u", "r", b"aaaa")
    assert faulty.get_record("u", "r") == b"aa\x9e\x9e"
    for new, torn in ((b"bbbbbb", b"bbaabb"), (b"ccc", b"ccb"), (b"d", b"d"), (b"eeee", b"eeee")):
        faulty.put_record("u", "r", new)
        assert faulty.get_record("u", "r") == torn


def test_slow_and_hanging_calls() -> None:
    faulty = Bench().faulty
    faulty.plan("locate", Slow(0.05), Hang(0.01), Hang())
    start = time.monotonic()
    assert faulty.locate("u", []) == []
    assert time.monotonic() - start >= 0.05
    with pytest.raises(PoolUnavailableError, match="hung"):
        faulty.locate("u", [])
    waiting = threading.Thread(target=faulty.locate, args=("u", []))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    faulty.release()
    waiting.join(10)
    assert not waiting.is_alive()
