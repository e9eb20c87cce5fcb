"""What the Mooncake backend consists of, without Mooncake."""

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError
from userkv.store.backend import (
    ObjectMissingError,
    PoolFullError,
    PoolUnavailableError,
    Region,
    StoreError,
    Tier,
    TierUsage,
)
from userkv.store.mooncake import errors, header, memory
from userkv.store.mooncake.calls import Gate, TimedCalls
from userkv.store.mooncake.files import FilesDirectory
from userkv.store.mooncake.master import ask_master
from userkv.store.mooncake.memory import ALIGNMENT, Arena
from userkv.store.mooncake.objects import LONGEST_NAME, Delivery, doubles, name_of
from userkv.store.mooncake.own_memory import OwnMemory, mapped, new_ranges
from userkv.store.mooncake.recent import SECONDS, Place, RecentPlaces
from userkv.store.regions import region_of

# Headers


@given(key=st.text(st.characters(codec="utf-8")), nbytes=st.integers(0, 2**63), checksum=st.integers(0, 2**64 - 1))
def test_a_header_fits_what_it_was_made_for(key: str, nbytes: int, checksum: int) -> None:
    data = header.pack(key, nbytes, checksum)
    assert len(data) == header.SIZE
    assert header.fault(data, key, nbytes, checksum) == ""


@pytest.mark.parametrize(
    ("key", "nbytes", "checksum", "reason"),
    [("other", 10, 99, "another key"), ("k", 11, 99, "10 bytes instead of 11"), ("k", 10, 98, "checksum")],
)
def test_a_header_of_something_else_says_what(key: str, nbytes: int, checksum: int, reason: str) -> None:
    assert reason in header.fault(header.pack("k", 10, 99), key, nbytes, checksum)


@given(st.binary(min_size=header.SIZE, max_size=header.SIZE))
def test_no_bytes_pass_for_a_header(data: bytes) -> None:
    assert header.fault(data, "k", 10, 99)


@given(st.integers(0, header.SIZE * 8 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    data = bytearray(header.pack("k", 10, 99))
    data[bit // 8] ^= 1 << bit % 8
    assert header.fault(bytes(data), "k", 10, 99) == "its header is damaged"


# Names and error codes


@given(st.text(st.characters(codec="utf-8"), max_size=400))
def test_names_do_as_file_names(key: str) -> None:
    assert len(name_of(key).encode()) <= LONGEST_NAME
    assert name_of(key) == key or len(key.encode()) > LONGEST_NAME


def test_long_keys_stay_apart() -> None:
    keys = ["x" * 300, "x" * 301, "x" * 299 + "y", "ü" * 150, "ü" * 151]
    assert len({name_of(key) for key in keys}) == 5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errors.MISSING, ObjectMissingError),
        (errors.NOT_READY, ObjectMissingError),
        (errors.NO_SPACE, PoolFullError),
        (errors.TRANSFER_FAILED, PoolUnavailableError),
        (-901, PoolUnavailableError),
        (-12345, PoolUnavailableError),
    ],
)
def test_error_codes(code: int, kind: type[StoreError]) -> None:
    error = errors.error_of(code, "get k")
    assert type(error) is kind
    assert str(code) in str(error)


def test_doubles_are_what_lies_in_memory_of_others() -> None:
    parts = [Region(100, 50), Region(0, 100), Region(149, 1), Region(200, 8), Region(120, 90), Region(100, 50)]
    left = [part for index, part in enumerate(parts) if index not in doubles(parts)]
    taken = [address for part in left for address in range(part.address, part.address + part.nbytes)]
    assert len(taken) == len(set(taken))
    assert Region(0, 100) in left
    assert doubles([Region(0, 10), Region(10, 10)]) == []


# Memory


def test_an_arena_lends_pieces_that_do_not_overlap() -> None:
    arena = Arena(1 << 20, 1024)
    with arena.lend(1) as first, arena.lend(100) as second, arena.lend(0) as third:
        assert first % ALIGNMENT == second % ALIGNMENT == 0
        assert len({first, second, third}) == 3
        assert second + 100 <= max(third, (1 << 20) + 1024)
    with arena.lend(1024) as address:
        assert address == 1 << 20


def test_an_arena_waits_for_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 0.1)
    arena = Arena(0, 256)
    with pytest.raises(PoolFullError, match="local_buffer_size"), arena.lend(257):
        pass
    with arena.lend(200), pytest.raises(PoolUnavailableError, match="in use"), arena.lend(100):
        pass
    monkeypatch.setattr(memory, "PATIENCE", 10.0)
    with ThreadPoolExecutor(1) as executor:
        with arena.lend(200):
            future = executor.submit(lambda: borrow(arena, 100))
            time.sleep(0.05)
            assert not future.done()
        assert future.result(5) == 0


def borrow(arena: Arena, nbytes: int) -> int:
    with arena.lend(nbytes) as address:
        return address


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_an_arena_is_whole_again_when_everything_came_back(sizes: list[int], choose: random.Random) -> None:
    arena = Arena(4096, 64 * ALIGNMENT)
    lent = []
    for size in sizes:
        piece = arena.lend(size)
        lent.append((piece, piece.__enter__()))
    assert len({address for _, address in lent}) == len(lent)
    choose.shuffle(lent)
    for piece, _ in lent:
        piece.__exit__(None, None, None)
    assert borrow(arena, 64 * ALIGNMENT) == 4096


# Calls


def test_a_call_that_does_not_return_is_left() -> None:
    calls = TimedCalls("test", 2)
    release = threading.Event()
    try:
        for _ in range(2):
            with pytest.raises(PoolUnavailableError, match=r"no answer .* 0\.05 s"):
                calls.run(release.wait, 0.05, "this")
        start = time.monotonic()
        with pytest.raises(PoolUnavailableError, match="stuck"):
            calls.run(lambda: 1, 0.05, "that")
        assert time.monotonic() - start < 2
        release.set()
        assert calls.run(lambda: 7, 5, "that") == 7
    finally:
        release.set()
        calls.close()


def test_calls_pass_on_what_they_raise_and_end() -> None:
    calls = TimedCalls("test", 1)
    for _ in range(3):
        with pytest.raises(PoolFullError):
            calls.run(raise_full, 5, "this")
    assert calls.run(lambda: 7, 5, "that") == 7
    calls.close()
    for _ in range(3):
        with pytest.raises(PoolUnavailableError, match="closed"):
            calls.run(lambda: 7, 5, "that")


def raise_full() -> None:
    raise PoolFullError("full")


def test_a_gate_waits_for_those_inside() -> None:
    gate = Gate()
    with gate.inside():
        assert not gate.close(0.05)
        with pytest.raises(PoolUnavailableError), gate.inside():
            pass
    assert gate.close(5)
    assert gate.close(5)


def test_a_delivery_ends_when_nobody_uses_the_memory() -> None:
    delivery = Delivery()
    with ThreadPoolExecutor(1) as executor:
        with delivery.lock:
            future = executor.submit(delivery.end)
            time.sleep(0.02)
            assert delivery.open
        future.result(5)
    assert not delivery.open


# What was located


def test_places_are_remembered_for_a_moment() -> None:
    now = [0.0]
    recent = RecentPlaces(lambda: now[0])
    dram, ssd = Place(Tier.DRAM), Place(Tier.SSD)
    recent.note(["a", "b", "c"], [dram, ssd, None])
    assert [recent.find(key) for key in "abcd"] == [dram, ssd, None, None]
    recent.note(["a"], [None])
    assert recent.find("a") is None
    now[0] = SECONDS
    assert recent.find("b") is None
    recent.note(["a"], [dram])
    recent.forget()
    assert recent.find("a") is None


# Own memory


def test_own_memory_holds_what_lies_in_it_alone() -> None:
    own = OwnMemory("here:1", 1000, 2000)

    def place(endpoint: str, address: int, nbytes: int) -> Region | None:
        return own.place(SimpleNamespace(transport_endpoint=endpoint, buffer_address=address, size=nbytes))

    assert place("here:1", 1000, 1000) == (1000, 1000)
    assert place("there:1", 1000, 1000) is None
    assert place("here:1", 999, 10) is None
    assert place("here:1", 1991, 10) is None


def test_what_was_mapped_since() -> None:
    before = [(10, 20), (30, 40)]
    assert new_ranges(before, [(5, 25), (28, 50), (60, 70)]) == [(5, 10), (20, 25), (28, 30), (40, 50), (60, 70)]
    assert new_ranges(before, before) == []
    assert new_ranges([], [(1, 2)]) == [(1, 2)]


def test_what_is_mapped() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    address = region_of(memoryview(memory)).address
    assert any(start <= address and address + (1 << 20) <= end for start, end in mapped())
    assert not any(start <= 0 < end for start, end in mapped())


# Files


def test_a_directory_has_one_user(tmp_path: Path) -> None:
    first = FilesDirectory(tmp_path / "a")
    assert first.left_tidy
    with pytest.raises(InvalidSettingError, match="in use"):
        FilesDirectory(tmp_path / "a")
    first.close(tidy=True)
    second = FilesDirectory(tmp_path / "a")
    assert second.left_tidy
    second.close(tidy=False)  # As if it had crashed.
    third = FilesDirectory(tmp_path / "a")
    assert not third.left_tidy
    third.close(tidy=True)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSettingError, match="cannot be used"):
        FilesDirectory(tmp_path / "file" / "a")


# The master's metrics

METRICS = b"""# HELP master_key_count x
# TYPE master_key_count gauge
master_key_count 10
master_active_clients 2
master_allocated_bytes 2000000
master_total_capacity_bytes 1.34217728e+08
master_allocated_file_size_bytes 0
master_total_file_capacity_bytes 0
segment_total_capacity_bytes{segment="127.0.0.1:1"} 33554432
segment_total_capacity_bytes{segment="127.0.0.1:2"} 100663296
"""


@pytest.fixture
def answer() -> Iterator[Callable[[bytes], str]]:
    """Set what an HTTP server answers; returns its address."""
    content = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content[0])

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()

    def set_answer(data: bytes) -> str:
        content[0] = data
        return f"127.0.0.1:{server.server_port}"

    yield set_answer
    server.shutdown()
    server.server_close()


def test_metrics_of_a_master(answer: Callable[[bytes], str]) -> None:
    status = ask_master(answer(METRICS))
    assert (status.keys, status.clients, status.largest_segment) == (10, 2, 96 << 20)
    assert status.usage() == [TierUsage(Tier.DRAM, 2_000_000, 128 << 20)]


@pytest.mark.parametrize("text", [b"", b"hello", METRICS.replace(b"2000000", b"nan"), METRICS.replace(b"10\n", b"x\n")])
def test_no_metrics_of_a_master(answer: Callable[[bytes], str], text: bytes) -> None:
    with pytest.raises(PoolUnavailableError):
        ask_master(answer(text))


def test_nobody_at_the_address_of_the_metrics() -> None:
    for address in ("127.0.0.1:1", "nonsense", "127.0.0.1:999999"):
        with pytest.raises(PoolUnavailableError, match="cannot be read"):
            ask_master(address)
