"""The worker's half over a real store: bytes that come back exactly, and steps that no store can hold up."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.faulty_backend import Hang, Raise, Slow
from tests.support.kv_layouts import BLOCKS, in_order
from tests.support.local import open_local
from tests.support.lookup_rpc import wait_until
from tests.support.memory_backend import MemoryBackend
from tests.support.worker_bench import MODES, NAMESPACE, Opener, workers
from userkv.engine.pool.wire.messages import (
    LookupCall,
    LookupReply,
    SaveNotice,
)
from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolUnavailableError,
    StoreError,
)


@pytest.fixture
def open_worker() -> Iterator[Opener]:
    with workers() as make:
        yield make


class TestRoundTrip:
    """What was saved is what is loaded, byte by byte, in other blocks."""

    @pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
    @pytest.mark.parametrize("kind", ["LBHNC", "two planes", "LHBNC", "padded", "kernel blocks", "different layers"])
    @pytest.mark.parametrize("mode", MODES)
    def test_saved_and_loaded(self, open_worker: Opener, mode: str, kind: str, staged: bool) -> None:
        with open_local(8 << 20) as local:
            bench = open_worker(local, kind, staged=staged, **MODES[mode])
            saved = bench.save([5, 1, 2, 6, 4], live=4)
            before = bench.snapshot()
            load = bench.load_job(saved, [3, 0, 6, 2, 5])
            bench.step(loads=[load])
            assert bench.loaded(load)
            bench.assert_blocks(before, {3: 5, 0: 1, 6: 2, 2: 6, 5: 4})
            assert bench.received == (["r"] if mode == "async" else [])
            assert bench.bad == []

    @pytest.mark.parametrize("mode", MODES)
    def test_blocks_that_nobody_wants_are_left_alone(self, open_worker: Opener, mode: str) -> None:
        bench = open_worker(**MODES[mode])
        saved = bench.save([5, 1, 2, 6])
        before = bench.snapshot()
        load = bench.load_job(saved, [None, 0, 3, None])
        bench.step(loads=[load])
        assert bench.loaded(load)
        bench.assert_blocks(before, {0: 1, 3: 2})

    @pytest.mark.parametrize("mode", ["async", "layerwise"])
    def test_through_the_disk_and_another_engine(self, open_worker: Opener, tmp_path: Path, mode: str) -> None:
        with open_local(0, tmp_path) as local:
            saved = open_worker(local, **MODES[mode]).save([5, 1, 2])
            bench = open_worker(local, **MODES[mode])
            before = bench.snapshot()
            for tensor in bench.kv.tensors.values():
                tensor.fill_(0)
            load = bench.load_job(saved, [3, 0, 6])
            bench.step(loads=[load])
            assert bench.loaded(load)
            for layer in range(2):
                for block, source in {3: 5, 0: 1, 6: 2}.items():
                    assert torch.equal(bench.kv.block(layer, block), before[layer][source])

    @pytest.mark.parametrize("mode", ["async", "sync", "layerwise"])
    def test_many_loads_in_a_step(self, open_worker: Opener, mode: str) -> None:
        bench = open_worker(load_threads=3, **MODES[mode])
        saved = [bench.save([block]) for block in (0, 1, 2)]
        before = bench.snapshot()
        loads = [bench.load_job(job, [6 - i], f"r{i}") for i, job in enumerate(saved)]
        bench.step(loads=loads)
        assert all(bench.loaded(load) for load in loads)
        bench.assert_blocks(before, {6: 0, 5: 1, 4: 2})

    def test_a_layer_is_an_object(self, open_worker: Opener) -> None:
        memory = MemoryBackend()
        bench = open_worker(memory, layerwise=True, load_async=False)
        saved = bench.save([5, 1, 2])
        keys = {key for extent, _ in saved.extents for key in bench.store.keys_of("u", NAMESPACE, extent)}
        assert memory.objects.keys() == keys
        assert len(keys) == 4

    def test_the_bytes_of_a_block_that_is_written_to_hold_still(self, open_worker: Opener) -> None:
        """A pool that reads its source twice (for the checksum, say) must see the same bytes."""
        memory = MemoryBackend()
        bench = open_worker(memory)
        job = bench.save_job([0, 1, 2, 3], live=3)
        bench.faulty.plan("put", None, Slow(0.2))
        bench.step(saves=[job])
        wait_until(lambda: bench.faulty.calls["put"] == 2)
        expected = b"".join(bench.kv.block(layer, block).numpy().tobytes() for layer in range(2) for block in (2, 3))
        for layer in range(2):
            bench.kv.block(layer, 3).fill_(-1)
        assert bench.outcome(job)
        assert memory.objects[bench.store.keys_of("u", NAMESPACE, job.extents[1][0])[0]] == expected


class TestFailedLoads:
    """A load that fails is reported with its request, and with the blocks that hold nothing."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("error", [ObjectMissingError, ObjectCorruptError, PoolUnavailableError])
    def test_the_blocks_from_the_failure_on(self, open_worker: Opener, mode: str, error: type[StoreError]) -> None:
        bench = open_worker(load_threads=1, **MODES[mode])
        saved = bench.save([0, 1, 2, 3])
        before = bench.snapshot()
        bench.faulty.plan("get", None, Raise(error))
        load = bench.load_job(saved, [6, 5, None, 4])
        bench.step(loads=[load])
        assert not bench.loaded(load)
        assert bench.bad == [4]
        bench.assert_blocks(before, {6: 0, 5: 1}, but=[4])
        assert bench.received == (["r"] if mode == "async" else [])

    @pytest.mark.parametrize("mode", MODES)
    def test_nothing_there(self, open_worker: Opener, mode: str) -> None:
        bench = open_worker(**MODES[mode])
        load = bench.load_job(bench.save_job([0, 1, 2]), [6, 5, 4])
        good = bench.load_job(bench.save([3]), [0], "good")
        bench.step(loads=[load, good])
        assert not bench.loaded(load)
        assert bench.loaded(good)
        assert sorted(set(bench.bad)) == [4, 5, 6]

    def test_blocks_and_request_are_reported_together(self, open_worker: Opener) -> None:
        bench = open_worker()
        bench.faulty.always(Hang(), "get")
        load = bench.load_job(bench.save([0, 1]), [5, 6])
        other = bench.load_job(bench.save([2]), [4], "other")
        bench.step(loads=[load, other])
        assert bench.poll() == (set(), set())
        bench.faulty.always(Raise(ObjectMissingError), "get")
        bench.faulty.plan("get", None)
        bench.faulty.release()
        seen: dict[str, set[int]] = {}

        def both() -> bool:
            received, bad = bench.poll()
            assert received or not bad
            seen.update(dict.fromkeys(received, bad))
            return len(seen) == 2

        wait_until(both)
        assert bench.poll() == (set(), set())

    @pytest.mark.parametrize("mode", MODES)
    def test_a_fault_of_ours(self, open_worker: Opener, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the store raises, the request goes on."""
        bench = open_worker(**MODES[mode])
        saved = bench.save([0, 1, 2])

        def broken(*args: object) -> None:
            raise KeyError("a fault of ours")

        monkeypatch.setattr(bench.store, "get_extent", broken)
        load = bench.load_job(saved, [6, 5, 4])
        bench.step(loads=[load])
        assert not bench.loaded(load)
        assert sorted(set(bench.bad)) == [4, 5, 6]

    def test_a_pool_that_is_down_is_asked_only_now_and_then(self, open_worker: Opener) -> None:
        bench = open_worker(load_threads=1)
        saved = bench.save([0])
        bench.faulty.always(Raise(PoolUnavailableError), "get")
        loads = [bench.load_job(saved, [6], str(i)) for i in range(20)]
        bench.step(loads=loads)
        assert not any(bench.loaded(load) for load in loads)
        assert bench.faulty.calls["get"] < 10
        assert sorted(bench.received) == sorted(str(i) for i in range(20))


class TestSlowStore:
    """Steps do not wait for the pool."""

    def test_steps_go_on_while_the_store_hangs(self, open_worker: Opener) -> None:
        bench = open_worker()
        saved = bench.save([0, 1])
        bench.faulty.always(Hang(), "get", "put", "locate", "get_record", "put_record", "remove")
        load, save = bench.load_job(saved, [6, 5]), bench.save_job([2, 3])
        asked = bench.caller.call(0, LookupCall, "u", NAMESPACE)
        took = [bench.step(loads=[load], saves=[save])] + [bench.step() for _ in range(20)]
        assert max(took) < 0.2
        assert bench.received == []
        assert bench.notices() == [SaveNotice(saved.job_id, True)]
        before = bench.snapshot()
        bench.faulty.clear()
        assert bench.loaded(load)
        assert bench.outcome(save)
        assert isinstance(asked.wait(), LookupReply)
        bench.assert_blocks(before, {6: 0, 5: 1})

    def test_a_slow_load_is_over_in_a_later_step(self, open_worker: Opener) -> None:
        bench = open_worker()
        saved = bench.save([0, 1])
        bench.faulty.plan("get", Slow(0.15))
        load = bench.load_job(saved, [6, 5])
        assert bench.step(loads=[load]) < 0.1
        assert bench.received == []
        assert bench.loaded(load)
        assert bench.received == ["r"]

    @pytest.mark.parametrize("mode", ["sync", "layerwise"])
    def test_without_async_the_step_waits(self, open_worker: Opener, mode: str) -> None:
        bench = open_worker(**MODES[mode])
        saved = bench.save([0, 1])
        before = bench.snapshot()
        bench.faulty.plan("get", Slow(0.15))
        load = bench.load_job(saved, [6, 5])
        seconds = bench.step(
            loads=[load], compute=lambda layer: torch.testing.assert_close(bench.kv.block(layer, 6), before[layer][0])
        )
        assert seconds >= 0.15
        assert bench.reports == {load.job_id: True}

    # One is being written and two wait; of two layers each, one half of one is being written, and three halves wait.
    @pytest.mark.parametrize(("layerwise", "kept"), [(False, 3), (True, 2)])
    def test_a_full_queue_drops_saves_and_counts_them(self, open_worker: Opener, layerwise: bool, kept: int) -> None:
        bench = open_worker(layerwise=layerwise, max_queued_saves=2)
        bench.faulty.always(Hang(), "put")
        jobs = [bench.save_job([0, 1, 2]) for _ in range(8)]
        bench.step(saves=jobs[:1])
        wait_until(lambda: bench.faulty.calls["put"] == 1)
        assert max(bench.step(saves=[job]) for job in jobs[1:]) < 0.2
        wait_until(lambda: len(bench.notices()) == 5)
        half_written = jobs[2:3] if layerwise else []
        assert bench.notices() == [SaveNotice(job.job_id, False, True) for job in jobs[kept + len(half_written) :]]
        stats = bench.worker.take_stats()
        assert stats is not None
        assert stats.data["gauges"]["pool_save_queue"] == (4 if layerwise else 2)
        bench.faulty.clear()
        assert [bench.outcome(job) for job in jobs] == [True] * kept + [False] * (8 - kept)
        assert len(bench.notices()) == 8
        assert sum(notice.dropped for notice in bench.notices()) == 8 - kept
        assert bench.save([4])

    def test_a_burst_of_loads_is_not_dropped(self, open_worker: Opener) -> None:
        bench = open_worker()
        saved = bench.save([0])
        bench.faulty.plan("get", *[Slow(0.002)] * 100)
        loads = [bench.load_job(saved, [6], str(i)) for i in range(100)]
        bench.step(loads=loads)
        assert all(bench.loaded(load) for load in loads)
        assert sorted(bench.received) == sorted(str(i) for i in range(100))


def test_contents_are_really_compared() -> None:
    """The tests above prove nothing if all blocks are alike."""
    kv = in_order("LBHNC")
    assert (
        len({bytes(kv.block(layer, block).contiguous().numpy()) for layer in range(2) for block in range(BLOCKS)}) == 14
    )
    assert ctypes.string_at(kv.block(1, 3).data_ptr(), 4) == kv.block(1, 3).flatten()[0].numpy().tobytes()
