"""How transfer threads reach KV memory: in place on a CPU, through staging memory elsewhere."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.kv_layouts import BLOCKS, KINDS, KV, LAYERS, contents
from userkv.engine.pool.worker import kv_memory as device
from userkv.engine.pool.worker.kv_layout import NOWHERE, KVLayout
from userkv.engine.pool.worker.kv_memory import HostBuffer, HostKVMemory, KVMemory, StagedKVMemory, kv_memory
from userkv.store.backend import Region
from userkv.store.regions import total_bytes

ALL = range(LAYERS)
MEMORIES = {
    "host": lambda kv, layout: HostKVMemory(layout.largest_piece, 4),
    "staged": lambda kv, layout: StagedKVMemory(kv.tensors, None),
}


class Bench:
    """KV tensors and one way to reach them."""

    def __init__(self, memory: str, kind: str) -> None:
        self.kv: KV = KINDS[kind](BLOCKS)
        self.layout = KVLayout.of(self.kv.tensors, BLOCKS)
        self.memory: KVMemory = MEMORIES[memory](self.kv, self.layout)

    def snapshot(self) -> list[list[torch.Tensor]]:
        return [[self.kv.block(layer, block).clone() for block in range(BLOCKS)] for layer in ALL]


@pytest.fixture(params=[(memory, kind) for memory in MEMORIES for kind in KINDS], ids="-".join)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(*request.param)


def fill(regions: Any, data: bytes) -> None:
    assert total_bytes(regions) == len(data)
    at = 0
    for address, nbytes in regions:
        ctypes.memmove(address, data[at : at + nbytes], nbytes)
        at += nbytes


def test_reading(bench: Bench) -> None:
    regions = bench.layout.regions([5, 2, 3], ALL)
    with bench.memory.read(regions, after=bench.memory.mark()) as host:
        assert contents(host) == contents(regions)


def test_writing_changes_the_blocks_that_are_wanted_and_no_others(bench: Bench) -> None:
    before = bench.snapshot()
    data = contents(bench.layout.regions([1, 2, 3, 4], ALL))
    with bench.memory.write(bench.layout.regions([6, None, None, 0], ALL)) as host:
        assert all(address != NOWHERE for address, _ in host)
        fill(host, data)
    for layer in ALL:
        for block in range(BLOCKS):
            source = {6: 1, 0: 4}.get(block, block)
            assert torch.equal(bench.kv.block(layer, block), before[layer][source])


def test_bytes_that_a_running_request_may_write_to_do_not_change_while_they_are_read(bench: Bench) -> None:
    live = bench.layout.regions([4], ALL)
    regions = bench.layout.regions([3, 4, 5], ALL, apart=4)
    before = contents(regions)
    with bench.memory.read(regions, live) as host:
        for layer in ALL:
            bench.kv.block(layer, 4).fill_(-1)
        assert contents(host) == before
    with bench.memory.read(regions, live) as host:
        assert contents(host) == contents(regions) != before


def test_threads_do_not_share_what_is_copied(bench: Bench) -> None:
    """Each thread reads an unstable block of its own while all others do."""
    together = threading.Barrier(4, timeout=10)
    wrong: list[int] = []

    def read(block: int) -> None:
        regions = bench.layout.regions([block], ALL)
        for _ in range(3):
            with bench.memory.read(regions, regions) as host:
                together.wait()
                if contents(host) != contents(regions):
                    wrong.append(block)
                together.wait()

    threads = [threading.Thread(target=read, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_small_and_large_reads_by_turns(bench: Bench) -> None:
    for blocks in ([1], [1, 2, 3, 4, 5], [6], [0, 1, 2]):
        regions = bench.layout.regions(blocks, ALL)
        with bench.memory.read(regions, regions) as host:
            assert contents(host) == contents(regions)
            assert total_bytes(host) == total_bytes(regions)


def test_what_a_failed_write_was_given_does_not_get_out() -> None:
    """The contract of ``get``: after an error the contents are undefined. Staging memory keeps them to itself."""
    bench = Bench("staged", "LBHNC")
    before = bench.snapshot()

    def fail() -> None:
        with bench.memory.write(bench.layout.regions([1, 2], ALL)) as host:
            fill(host, bytes(total_bytes(host)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(
        torch.equal(bench.kv.block(layer, block), before[layer][block]) for layer in ALL for block in range(BLOCKS)
    )


def test_host_memory_is_read_and_written_in_place() -> None:
    bench = Bench("host", "two planes")
    regions = bench.layout.regions([3, 4, 5], ALL, apart=4)
    live = bench.layout.regions([4], ALL)
    with bench.memory.read(regions) as host:
        assert list(host) == regions
    with bench.memory.read(regions, live) as host:
        assert [mine == theirs for mine, theirs in zip(host, regions, strict=True)] == [
            region not in live for region in regions
        ]
    with bench.memory.write(regions) as host:
        assert list(host) == regions
    assert bench.memory.mark() is None


def test_more_threads_write_than_there_is_memory_for() -> None:
    memory = HostKVMemory(16, 1)
    regions = [Region(NOWHERE, 16)]

    def write() -> None:
        with memory.write(regions):
            pass

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="writers=1"):
        write()


@pytest.mark.parametrize("kind", ["LBHNC", "two planes", "different layers"])
def test_nothing_is_written_beyond_the_memory_that_is_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind a buffer would be overwritten silently."""
    allowed: list[Region] = []

    class Watched(HostBuffer):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            allowed.append(Region(self.address, nbytes))

    monkeypatch.setattr(device, "HostBuffer", Watched)
    bench = Bench("host", kind)
    spans = bench.layout.spans()
    registered = bench.memory.host_spans(spans)
    assert sorted(registered) == sorted([*spans, *allowed])  # Transports write to all of it.
    allowed += spans
    for blocks in ([1], [1, None, 3, 4, None], [None] * 3):
        regions = bench.layout.regions(blocks, ALL)
        with bench.memory.write(regions) as host:
            assert_inside(host, allowed)
            assert_inside(host, registered)
        readable = [region for region in regions if region.address != NOWHERE]
        with bench.memory.read(readable, readable) as host:
            assert_inside(host, allowed)
            assert contents(host) == contents(readable)


def assert_inside(regions: Any, allowed: Any) -> None:
    for address, nbytes in regions:
        assert any(base <= address and address + nbytes <= base + size for base, size in allowed)


def test_staging_memory_reaches_nothing_but_kv() -> None:
    bench = Bench("staged", "LBHNC")
    end = max(span.address + span.nbytes for span in bench.layout.spans())
    for region in (Region(end - 4, 8), Region(end, 1), Region(1, 1)):
        with pytest.raises(ValueError, match="not KV memory"), bench.memory.read([region]):
            pass


def test_the_right_access_for_a_cpu() -> None:
    bench = Bench("host", "LBHNC")
    assert isinstance(kv_memory(bench.kv.tensors, 16, 2), HostKVMemory)


class FakeModule:
    """Streams and events as in ``torch.cuda``, which only note what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        module = self

        class Event:
            def record(self, stream: str) -> None:
                module.log.append(f"record on {stream}")

        class Stream:
            def wait_event(self, event: Event) -> None:
                assert isinstance(event, Event)
                module.log.append("wait")

            def synchronize(self) -> None:
                module.log.append("synchronize")

        self.Event, self.Stream = Event, Stream

    def current_stream(self) -> str:
        return "compute"

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")


def test_copies_wait_for_the_computation_and_are_over_when_the_bytes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, module = Bench("staged", "LBHNC"), FakeModule()
    empty = torch.empty
    monkeypatch.setattr(device.torch, "empty", lambda *args, pin_memory=False, **rest: empty(*args, **rest))
    memory = StagedKVMemory(bench.kv.tensors, module)
    regions = bench.layout.regions([1], ALL)
    with memory.read(regions, after=memory.mark()) as host:
        assert module.log == ["record on compute", "wait", "enter", "leave", "synchronize"]
        assert contents(host) == contents(regions)
    module.log.clear()
    with memory.write(regions) as host:
        fill(host, bytes(total_bytes(host)))
        assert module.log == []
    assert module.log == ["enter", "leave", "synchronize"]
    assert not any(contents(regions))
