"""The worker's half: how saves end, and layers that are loaded ahead of the model and saved behind it."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.faulty_backend import Lose, Raise
from tests.support.lookup_rpc import wait_until
from tests.support.memory_backend import MemoryBackend
from tests.support.worker_bench import NAMESPACE, GatedBackend, Opener, WorkerBench, running, workers
from userkv.engine.pool.wire.messages import (
    RemoveCall,
    SaveNotice,
    StepJobs,
    extents_to_wire,
)
from userkv.engine.pool.worker import transfer_threads as transfer
from userkv.store.backend import (
    ObjectMissingError,
    PoolFullError,
    PoolUnavailableError,
    StoreError,
)


@pytest.fixture
def open_worker() -> Iterator[Opener]:
    with workers() as make:
        yield make


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
        bench.caller.ask(0, RemoveCall, "u", NAMESPACE, extents_to_wire([extent for extent, _ in job.extents]))
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


class TestLayerByLayer:
    """Loads run ahead of the model, saves behind it."""

    def begin(self, bench: WorkerBench, gates: GatedBackend, blocks: list[int]) -> Callable[[], None]:
        saved = bench.save([0, 1, 2][: len(blocks)])
        gates.reading.clear()
        gates.hold("get", *range(bench.num_layers))
        load = bench.load_job(saved, blocks)
        bench.worker.begin_step(StepJobs([load], []))
        return bench.worker.start_loads

    def test_a_layer_ends_when_the_next_one_is_loaded(self, open_worker: Opener) -> None:
        """vLLM writes the step's own KV of a layer before it asks for that layer: a load must not come after it."""
        gates = GatedBackend()
        bench = open_worker(gates, layers=4, layerwise=True, load_async=False, load_threads=4)
        written: list[int] = []

        def model() -> None:
            start()
            for layer in range(4):
                written.append(layer)
                bench.worker.wait_for_layer(layer)
                bench.worker.layer_computed(layer)

        start = self.begin(bench, gates, [6, 5])
        with running(model):
            for layer in range(4):
                time.sleep(0.03)
                assert written == list(range(layer))
                gates.let("get", layer)
                wait_until(lambda now=layer: len(written) > now)
        assert written == [0, 1, 2, 3]
        bench.worker.end_step()

    @pytest.mark.parametrize("ahead", [1, 2, 9])
    def test_loads_run_ahead_by_so_many_layers(self, open_worker: Opener, ahead: int) -> None:
        """But the first layer, for which the computation waits, is loaded alone."""
        gates = GatedBackend()
        bench = open_worker(gates, layers=5, layerwise=True, load_async=False, load_threads=5, prefetch_layers=ahead)
        start = self.begin(bench, gates, [6])
        expected = [[0], *(list(range(min(5, layer + 1 + ahead))) for layer in range(1, 5))]
        asked: list[list[int]] = []

        def model() -> None:
            start()
            for layer in range(5):
                bench.worker.wait_for_layer(layer)
                bench.worker.layer_computed(layer)

        with running(model):
            for layer in range(5):
                wait_until(lambda now=layer: len(gates.reading) == len(expected[now]))
                time.sleep(0.02)
                asked.append(sorted(gates.reading))
                gates.let("get", layer)
        assert asked == expected
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
        assert bench.notices() == [SaveNotice(job.job_id, True)]

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
