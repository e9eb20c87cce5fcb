"""The worker's half over a real store: bytes that come back exactly, and steps that no store can hold up."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.kv_layouts import BLOCKS, KINDS, in_order
from tests.support.local import open_local
from tests.support.memory_backend import MemoryBackend
from tests.support.records import record_of
from tests.support.rpc import wait_until
from tests.support.worker_bench import NAMESPACE, GatedBackend, WorkerBench, running
from userkv.core.record import UserRecord
from userkv.engine.pool import transfer, worker_half
from userkv.engine.pool.messages import (
    Commit,
    Committed,
    Failed,
    Found,
    Locate,
    Located,
    Lookup,
    Remove,
    Saved,
    StepJobs,
    to_wire,
)
from userkv.engine.pool.stats import COUNTERS, GAUGES, HISTOGRAMS
from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolBackend,
    PoolFullError,
    PoolUnavailableError,
    StoreError,
)
from userkv.store.faults import Hang, Lose, Raise, Slow

MODES: dict[str, dict[str, bool]] = {
    "async": {},
    "sync": {"load_async": False},
    "layerwise": {"load_async": False, "layerwise": True},
}
Opener = Callable[..., WorkerBench]


@pytest.fixture
def open_worker() -> Iterator[Opener]:
    """Makes workers and ends them."""
    benches: list[WorkerBench] = []

    def make(
        backend: PoolBackend | None = None, kind: str = "LBHNC", layers: int = 2, **options: object
    ) -> WorkerBench:
        kv = in_order("LBHNC", layers=layers) if kind == "LBHNC" else KINDS[kind](BLOCKS)
        benches.append(WorkerBench(backend or MemoryBackend(), kv, **options))  # type: ignore[arg-type]
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread may die of an exception."""
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))
    yield
    assert died == []


@pytest.mark.usefixtures("quiet_threads")
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
        job = bench.save_job([0, 1, 2], live=2)
        bench.faulty.plan("put", None, Slow(0.2))
        bench.step(saves=[job])
        wait_until(lambda: bench.faulty.calls["put"] == 2)
        expected = b"".join(bench.kv.block(layer, 2).numpy().tobytes() for layer in range(2))
        for layer in range(2):
            bench.kv.block(layer, 2).fill_(-1)
        assert bench.outcome(job)
        assert memory.objects[bench.store.keys_of("u", NAMESPACE, job.extents[1][0])[0]] == expected


@pytest.mark.usefixtures("quiet_threads")
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


@pytest.mark.usefixtures("quiet_threads")
class TestSlowStore:
    """Steps do not wait for the pool."""

    def test_steps_go_on_while_the_store_hangs(self, open_worker: Opener) -> None:
        bench = open_worker()
        saved = bench.save([0, 1])
        bench.faulty.always(Hang(), "get", "put", "locate", "get_record", "put_record", "remove")
        load, save = bench.load_job(saved, [6, 5]), bench.save_job([2, 3])
        asked = bench.caller.call(0, Lookup, "u", NAMESPACE)
        took = [bench.step(loads=[load], saves=[save])] + [bench.step() for _ in range(20)]
        assert max(took) < 0.2
        assert bench.received == []
        assert bench.notices() == [Saved(saved.job_id, True)]
        before = bench.snapshot()
        bench.faulty.clear()
        assert bench.loaded(load)
        assert bench.outcome(save)
        assert isinstance(asked.wait(), Found)
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
        assert bench.notices() == [Saved(job.job_id, False, True) for job in jobs[kept + len(half_written) :]]
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


@pytest.mark.usefixtures("quiet_threads")
class TestSaves:
    """How saves end."""

    @pytest.mark.parametrize("layerwise", [False, True])
    @pytest.mark.parametrize("error", [PoolFullError, PoolUnavailableError])
    def test_a_save_that_fails(self, open_worker: Opener, layerwise: bool, error: type[StoreError]) -> None:
        bench = open_worker(layerwise=layerwise)
        bench.faulty.plan("put", None, Raise(error))
        job = bench.save_job([0, 1, 2, 3])
        bench.step(saves=[job])
        assert not bench.outcome(job)
        assert bench.save([4, 5])
        assert [notice.ok for notice in bench.notices()] == [False, True]

    def test_a_fault_of_ours(self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = open_worker()

        def broken(*args: object) -> None:
            raise KeyError("a fault of ours")

        with monkeypatch.context() as patch:
            patch.setattr(bench.store, "put_extent", broken)
            job = bench.save_job([0])
            bench.step(saves=[job])
            assert not bench.outcome(job)
        assert bench.save([1])

    def test_objects_that_were_in_use_are_removed_later(
        self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer, "SWEEP_SECONDS", 0.02)
        monkeypatch.setattr("userkv.store.removals.FIRST_PAUSE", 0.02)
        memory = MemoryBackend()
        bench = open_worker(memory)
        job = bench.save([0, 1])
        memory.leased.update(memory.objects)
        bench.caller.ask(0, Remove, "u", NAMESPACE, to_wire([extent for extent, _ in job.extents]))
        assert memory.objects
        memory.leased.clear()
        wait_until(lambda: not memory.objects)

    def test_a_sweep_that_raises_does_not_end_saving(
        self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer, "SWEEP_SECONDS", 0.01)
        memory = MemoryBackend()
        bench = open_worker(memory)
        swept = threading.Event()

        def broken(*args: object) -> None:
            swept.set()
            raise KeyError("a fault of ours")

        monkeypatch.setattr("userkv.store.removals.PendingRemovals.sweep", broken)
        assert swept.wait(5)
        time.sleep(0.05)
        job = bench.save_job([2])
        bench.step(saves=[job])
        wait_until(bench.notices, 2)
        assert bench.outcome(job)

    def test_evicted_while_it_is_written(self, open_worker: Opener) -> None:
        bench = open_worker()
        bench.faulty.plan("put", Lose())
        job = bench.save([0, 1, 2])
        load = bench.load_job(job, [6, 5, 4])
        bench.step(loads=[load])
        assert not bench.loaded(load)
        assert bench.bad == [4, 5, 6]


@pytest.mark.usefixtures("quiet_threads")
class TestLayerByLayer:
    """Loads run ahead of the model, saves behind it."""

    def begin(self, bench: WorkerBench, gates: GatedBackend, blocks: list[int]) -> Callable[[], None]:
        saved = bench.save([0, 1, 2][: len(blocks)])
        gates.reading.clear()
        gates.hold("get", *range(bench.num_layers))
        load = bench.load_job(saved, blocks)
        bench.worker.begin_step(StepJobs([load], []))
        return bench.worker.start_loads

    def test_attention_waits_for_the_next_layer(self, open_worker: Opener) -> None:
        """vLLM writes the step's own KV of a layer before it asks for that layer: a load must not come after it."""
        gates = GatedBackend()
        bench = open_worker(gates, layers=4, layerwise=True, load_async=False, load_threads=4)
        passed: list[int] = []

        def model() -> None:
            start()
            passed.append(-1)
            for layer in range(4):
                bench.worker.wait_for_layer(layer)
                passed.append(layer)

        start = self.begin(bench, gates, [6, 5])
        with running(model):
            time.sleep(0.05)
            assert passed == []
            for layer in range(4):
                gates.let("get", layer)
                # With the last layer loaded there is no other one to wait for.
                expected = layer + 1 if layer < 3 else 5
                wait_until(lambda now=expected: len(passed) >= now)
                time.sleep(0.03)
                assert len(passed) == expected
        assert passed == [-1, 0, 1, 2, 3]
        bench.worker.end_step()

    @pytest.mark.parametrize("ahead", [1, 2, 9])
    def test_loads_run_ahead_by_so_many_layers(self, open_worker: Opener, ahead: int) -> None:
        gates = GatedBackend()
        bench = open_worker(gates, layers=5, layerwise=True, load_async=False, load_threads=5, prefetch_layers=ahead)
        start = self.begin(bench, gates, [6])
        asked: list[list[int]] = []

        def model() -> None:
            start()
            for layer in range(5):
                bench.worker.wait_for_layer(layer)

        with running(model):
            for layer in range(5):
                wait_until(lambda now=layer: len(gates.reading) == min(5, now + 1 + ahead))
                time.sleep(0.02)
                asked.append(sorted(gates.reading))
                gates.let("get", layer)
        assert asked == [list(range(min(5, layer + 1 + ahead))) for layer in range(5)]
        bench.worker.end_step()

    def test_a_layer_that_fails_does_not_hold_up_the_others(self, open_worker: Opener) -> None:
        bench = open_worker(layers=4, layerwise=True, load_async=False, load_threads=1)
        saved = bench.save([0, 1, 2])
        before = bench.snapshot()
        bench.faulty.plan("get", None, None, Raise(ObjectMissingError))  # The first extent of the second layer.
        load = bench.load_job(saved, [6, 5, 4])
        bench.step(loads=[load])
        assert bench.reports == {load.job_id: False}
        assert bench.bad == [4, 5, 6]
        for layer in (0, 2, 3):
            assert torch.equal(bench.kv.block(layer, 4), before[layer][2])

    def test_saved_while_the_step_computes(self, open_worker: Opener) -> None:
        """What a layer computes is saved although a later layer of the step is not computed yet."""
        gates = GatedBackend()
        bench = open_worker(gates, layers=3, layerwise=True, load_async=False)
        job = bench.save_job([0, 1, 2], live=2, during_forward=True)
        written: list[list[int]] = []

        def compute(layer: int) -> None:
            if layer:
                wait_until(lambda: len(gates.objects) == 2 * layer)
            written.append(sorted(set(gates.writing)))
            for block in range(3):
                bench.kv.block(layer, block).fill_(100 * layer + block)

        bench.step(saves=[job], compute=compute)
        assert written == [[], [0], [0, 1]]
        assert bench.outcome(job)
        for extent, blocks in job.extents:
            for layer, key in enumerate(bench.store.keys_of("u", NAMESPACE, extent)):
                values = torch.frombuffer(bytearray(gates.objects[key]), dtype=torch.int32)
                assert values.unique().tolist() == [100 * layer + block for block in blocks]
        assert bench.notices() == [Saved(job.job_id, True)]

    def test_no_notice_before_the_last_layer_is_written(self, open_worker: Opener) -> None:
        gates = GatedBackend()
        bench = open_worker(gates, layers=3, layerwise=True, load_async=False)
        gates.hold("put", 2)
        job = bench.save_job([0], during_forward=True)
        bench.step(saves=[job])
        wait_until(lambda: gates.writing == [0, 1, 2])
        time.sleep(0.03)
        assert bench.notices() == []
        gates.let("put", 2)
        assert bench.outcome(job)

    @pytest.mark.parametrize("layers", [0, 1, 2])
    def test_a_step_that_does_not_run_through_the_model(self, open_worker: Opener, layers: int) -> None:
        bench = open_worker(layers=3, layerwise=True, load_async=False)
        job = bench.save_job([0, 1], during_forward=True)
        bench.step(saves=[job], layers=layers)
        assert not bench.outcome(job)
        later = bench.save_job([2], during_forward=True)
        bench.step(saves=[later])
        assert bench.outcome(later)
        assert len(bench.notices()) == 2

    def test_saves_of_both_kinds_in_a_step(self, open_worker: Opener) -> None:
        bench = open_worker(layers=3, layerwise=True, load_async=False)
        jobs = [bench.save_job([0, 1], during_forward=True), bench.save_job([2, 3])]
        bench.step(saves=jobs)
        assert all(bench.outcome(job) for job in jobs)
        before = bench.snapshot()
        loads = [bench.load_job(jobs[0], [4, None], "a"), bench.load_job(jobs[1], [5, 6], "b")]
        bench.step(loads=loads)
        bench.assert_blocks(before, {4: 0, 5: 2, 6: 3})


@pytest.mark.usefixtures("quiet_threads")
class TestAnswers:
    """What a worker answers the scheduler."""

    def test_look_up_commit_and_remove(self, open_worker: Opener) -> None:
        bench = open_worker()
        assert bench.caller.ask(0, Lookup, "u", NAMESPACE).record == b""
        job = bench.save([0, 1, 2])
        record = UserRecord(1, record_of(range(12)).tokens, 4, tuple(extent for extent, _ in job.extents), "w", 1.0)
        committed = bench.caller.ask(0, Commit, "u", NAMESPACE, record.encode("u", NAMESPACE), 0)
        assert isinstance(committed, Committed)
        assert (committed.committed, committed.garbage) == (True, ())
        found = bench.caller.ask(0, Lookup, "u", NAMESPACE)
        assert found.tiers == ("dram", "dram")
        assert UserRecord.decode(found.record, "u", NAMESPACE).extents == record.extents
        extents = to_wire(record.extents)
        assert bench.caller.ask(0, Remove, "u", NAMESPACE, extents[:1]).tiers == ()
        assert bench.caller.ask(0, Locate, "u", NAMESPACE, extents).tiers == ("", "dram")
        assert bench.caller.ask(0, Lookup, "u", NAMESPACE).tiers == ("", "dram")
        refused = bench.caller.ask(0, Commit, "u", NAMESPACE, record.encode("u", NAMESPACE), committed.generation)
        assert not refused.committed
        assert refused.reason

    @pytest.mark.parametrize("data", [b"", b"x" * 2000, record_of(range(9)).encode("v", NAMESPACE)])
    def test_records_that_cannot_be_read(self, open_worker: Opener, data: bytes) -> None:
        bench = open_worker()
        assert isinstance(bench.caller.ask(0, Commit, "u", NAMESPACE, data, 0), Failed)
        assert isinstance(bench.caller.ask(0, Lookup, "u", NAMESPACE), Found)

    @pytest.mark.parametrize("extent", [(-1, 0, 1), (1, -1, 1), (1, 0, 0), (2**63, 0, 1), (1, 0, 2**40)])
    def test_extents_that_cannot_be(self, open_worker: Opener, extent: tuple[int, int, int]) -> None:
        bench = open_worker()
        assert isinstance(bench.caller.ask(0, Locate, "u", NAMESPACE, (extent,)), Failed)
        assert isinstance(bench.caller.ask(0, Remove, "u", NAMESPACE, (extent,)), Failed)
        assert bench.caller.ask(0, Locate, "u", NAMESPACE, ()).tiers == ()

    def test_a_pool_that_is_down(self, open_worker: Opener) -> None:
        bench = open_worker()
        bench.faulty.always(Raise(PoolUnavailableError))
        record = record_of(range(9)).encode("u", NAMESPACE)
        assert isinstance(bench.caller.ask(0, Lookup, "u", NAMESPACE), Failed)
        assert isinstance(bench.caller.ask(0, Commit, "u", NAMESPACE, record, 0), Failed)
        assert isinstance(bench.caller.ask(0, Locate, "u", NAMESPACE, ((1, 0, 1),)), Failed)
        assert isinstance(bench.caller.ask(0, Remove, "u", NAMESPACE, ((1, 0, 1),)), Located)  # Tried again later.

    def test_a_fault_of_ours_is_an_answer(self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = open_worker()

        def broken(*args: object) -> None:
            raise KeyError("a fault of ours")

        monkeypatch.setattr(bench.store, "lookup", broken)
        assert isinstance(bench.caller.ask(0, Lookup, "u", NAMESPACE), Failed)


class TestFigures:
    """What a worker tells of itself."""

    def test_bytes_seconds_and_gauges(self, open_worker: Opener) -> None:
        with open_local(8 << 20) as local:
            bench = open_worker(local)
            saved = bench.save([0, 1, 2])
            load = bench.load_job(saved, [6, 5, 4])
            bench.step(loads=[load])
            assert bench.loaded(load)
            stats = bench.worker.take_stats()
            assert stats is not None
            nbytes = 3 * sum(bench.kv.nbytes(layer) for layer in range(2))
            seen = stats.data["observations"]
            assert seen["save_bytes"] == seen["load_bytes"] == [nbytes]
            assert 0 < seen["save_seconds"][0] < 5
            assert 0 < seen["load_seconds"][0] < 5
            gauges = stats.data["gauges"]
            assert gauges["pool_budget_dram"] == 8 << 20
            assert gauges["pool_used_dram"] >= nbytes
            assert (gauges["pool_load_queue"], gauges["pool_save_queue"], gauges["pool_breaker_open"]) == (0, 0, 0)
            assert gauges.keys() <= GAUGES.keys()
            assert seen.keys() <= HISTOGRAMS.keys()
            second = bench.worker.take_stats()
            assert second is not None
            assert "observations" not in second.data

    def test_what_fails_is_not_timed(self, open_worker: Opener) -> None:
        bench = open_worker()
        load = bench.load_job(bench.save_job([0]), [6])
        bench.step(loads=[load])
        assert not bench.loaded(load)
        stats = bench.worker.take_stats()
        assert stats is not None
        assert "observations" not in stats.data

    def test_a_broken_pool(self, open_worker: Opener) -> None:
        bench = open_worker(load_threads=1)
        saved = bench.save([0])
        assert bench.worker.take_stats() is not None
        bench.faulty.always(Raise(PoolUnavailableError))
        loads = [bench.load_job(saved, [6], str(i)) for i in range(4)]
        bench.step(loads=loads)
        assert not any(bench.loaded(load) for load in loads)
        time.sleep(1.05)
        stats = bench.worker.take_stats()
        assert stats is not None
        assert stats.data["counts"]["pool_breaker_openings"] >= 1
        assert stats.data["counts"].keys() <= COUNTERS.keys()
        assert stats.data["gauges"]["pool_breaker_open"] == 1


class TestShutdown:
    """A worker ends within seconds, whatever the pool does."""

    @pytest.mark.usefixtures("quiet_threads")
    @pytest.mark.parametrize("mode", MODES)
    def test_with_jobs_in_the_queues(self, open_worker: Opener, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_half, "JOIN_SECONDS", 0.1)
        bench = open_worker(load_threads=2, **MODES[mode])
        saved = bench.save([0, 1])
        bench.faulty.always(Hang(), "put", "get")
        saves = [bench.save_job([2, 3]) for _ in range(5)]
        if mode == "async":
            bench.step(loads=[bench.load_job(saved, [6, 5], str(i)) for i in range(5)], saves=saves)
        else:
            bench.step(saves=saves)
        start = time.monotonic()
        bench.worker.shutdown()
        assert time.monotonic() - start < 3
        bench.worker.shutdown()
        bench.faulty.release()
        time.sleep(0.1)
        alive = [thread.name for thread in threading.enumerate()]
        assert not any("KVCacheStore" in name for name in alive), alive

    @pytest.mark.usefixtures("quiet_threads")
    def test_what_outlives_the_shutdown_reports_to_nobody(
        self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_half, "JOIN_SECONDS", 0.05)
        bench = open_worker()
        bench.faulty.always(Hang(), "put")
        monkeypatch.setattr(bench.faulty, "close", lambda: None)
        bench.step(saves=[bench.save_job([0])])
        wait_until(lambda: bench.faulty.calls["put"] == 1)
        bench.worker.shutdown()
        bench.faulty.release()
        wait_until(lambda: not any("Sending" in thread.name for thread in threading.enumerate()))

    @pytest.mark.usefixtures("quiet_threads")
    def test_while_a_call_hangs(self, open_worker: Opener) -> None:
        """Backends give up in bounded time; then the call is answered, and the worker ends."""
        bench = open_worker()
        bench.faulty.always(Hang(0.5), "get_record")
        asked = bench.caller.call(0, Lookup, "u", NAMESPACE)
        wait_until(lambda: bench.faulty.calls["get_record"])
        start = time.monotonic()
        bench.worker.shutdown()
        assert time.monotonic() - start < 2
        assert asked.wait().reason.startswith("get_record hung")

    def test_an_idle_worker(self, open_worker: Opener) -> None:
        before = set(threading.enumerate())
        bench = open_worker()
        start = time.monotonic()
        bench.worker.shutdown()
        bench.caller.client.close()
        assert time.monotonic() - start < 2
        assert set(threading.enumerate()) <= before


def test_contents_are_really_compared() -> None:
    """The tests above prove nothing if all blocks are alike."""
    kv = in_order("LBHNC")
    assert (
        len({bytes(kv.block(layer, block).contiguous().numpy()) for layer in range(2) for block in range(BLOCKS)}) == 14
    )
    assert ctypes.string_at(kv.block(1, 3).data_ptr(), 4) == kv.block(1, 3).flatten()[0].numpy().tobytes()
