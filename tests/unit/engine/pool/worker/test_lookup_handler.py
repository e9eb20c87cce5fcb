"""The worker's half beside the model: answers to the scheduler, figures, and its end."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.faulty_backend import Hang, Raise
from tests.support.local import open_local
from tests.support.lookup_rpc import wait_until
from tests.support.records import record_of
from tests.support.worker_bench import MODES, NAMESPACE, Opener, workers
from userkv.engine.pool.metrics import COUNTERS, GAUGES, HISTOGRAMS
from userkv.engine.pool.wire.messages import (
    CommitCall,
    CommitReply,
    ErrorReply,
    LocateCall,
    LocateReply,
    LookupCall,
    LookupReply,
    RemoveCall,
    extents_to_wire,
)
from userkv.engine.pool.worker import connector_worker as worker_half
from userkv.records.record import UserRecord
from userkv.serving import child_processes as children
from userkv.serving import launch_plan
from userkv.store.backend import (
    PoolUnavailableError,
)
from userkv.store.local import backend as local_backend
from userkv.store.mooncake import connection
from userkv.store.records import group_of


@pytest.fixture
def open_worker() -> Iterator[Opener]:
    with workers() as make:
        yield make


class TestAnswers:
    """What a worker answers the scheduler."""

    def test_look_up_commit_and_remove(self, open_worker: Opener) -> None:
        bench = open_worker()
        assert bench.caller.ask(0, LookupCall, "u", NAMESPACE).record == b""
        job = bench.save([0, 1, 2])
        record = UserRecord(1, record_of(range(12)).tokens, 4, tuple(extent for extent, _ in job.extents), "w", 1.0)
        committed = bench.caller.ask(0, CommitCall, "u", NAMESPACE, record.encode("u", NAMESPACE), 0)
        assert isinstance(committed, CommitReply)
        assert (committed.committed, committed.garbage) == (True, ())
        found = bench.caller.ask(0, LookupCall, "u", NAMESPACE)
        assert found.tiers == ("dram", "dram")
        assert UserRecord.decode(found.record, "u", NAMESPACE).extents == record.extents
        extents = extents_to_wire(record.extents)
        assert bench.caller.ask(0, RemoveCall, "u", NAMESPACE, extents[:1]).tiers == ()
        assert bench.caller.ask(0, LocateCall, "u", NAMESPACE, extents).tiers == ("", "dram")
        assert bench.caller.ask(0, LookupCall, "u", NAMESPACE).tiers == ("", "dram")
        refused = bench.caller.ask(0, CommitCall, "u", NAMESPACE, record.encode("u", NAMESPACE), committed.generation)
        assert not refused.committed
        assert refused.reason

    def test_the_first_question_of_a_request_counts_for_the_order_of_eviction(
        self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = open_worker()
        noted: list[str] = []
        monkeypatch.setattr(bench.faulty, "count_request", noted.append)
        bench.caller.ask(0, LookupCall, "u", NAMESPACE)
        bench.caller.ask(0, LookupCall, "v", NAMESPACE, True)
        assert noted == [group_of("v", NAMESPACE)]

    @pytest.mark.parametrize("data", [b"", b"x" * 2000, record_of(range(9)).encode("v", NAMESPACE)])
    def test_records_that_cannot_be_read(self, open_worker: Opener, data: bytes) -> None:
        bench = open_worker()
        assert isinstance(bench.caller.ask(0, CommitCall, "u", NAMESPACE, data, 0), ErrorReply)
        assert isinstance(bench.caller.ask(0, LookupCall, "u", NAMESPACE), LookupReply)

    @pytest.mark.parametrize("extent", [(-1, 0, 1), (1, -1, 1), (1, 0, 0), (2**63, 0, 1), (1, 0, 2**40)])
    def test_extents_that_cannot_be(self, open_worker: Opener, extent: tuple[int, int, int]) -> None:
        bench = open_worker()
        assert isinstance(bench.caller.ask(0, LocateCall, "u", NAMESPACE, (extent,)), ErrorReply)
        assert isinstance(bench.caller.ask(0, RemoveCall, "u", NAMESPACE, (extent,)), ErrorReply)
        assert bench.caller.ask(0, LocateCall, "u", NAMESPACE, ()).tiers == ()

    def test_a_pool_that_is_down(self, open_worker: Opener) -> None:
        bench = open_worker()
        bench.faulty.always(Raise(PoolUnavailableError))
        record = record_of(range(9)).encode("u", NAMESPACE)
        assert isinstance(bench.caller.ask(0, LookupCall, "u", NAMESPACE), ErrorReply)
        assert isinstance(bench.caller.ask(0, CommitCall, "u", NAMESPACE, record, 0), ErrorReply)
        assert isinstance(bench.caller.ask(0, LocateCall, "u", NAMESPACE, ((1, 0, 1),)), ErrorReply)
        assert isinstance(
            bench.caller.ask(0, RemoveCall, "u", NAMESPACE, ((1, 0, 1),)), LocateReply
        )  # Tried again later.

    def test_a_fault_of_ours_is_an_answer(self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = open_worker()

        def broken(*args: object) -> None:
            raise KeyError("a fault of ours")

        monkeypatch.setattr(bench.store, "lookup", broken)
        assert isinstance(bench.caller.ask(0, LookupCall, "u", NAMESPACE), ErrorReply)


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
        time.sleep(0.1)  # Until the threads hang.
        calls = dict(bench.faulty.calls)
        start = time.monotonic()
        bench.worker.shutdown()
        assert time.monotonic() - start < 3
        bench.worker.shutdown()
        bench.faulty.release()
        wait_until(lambda: not any("KVCacheStore" in thread.name for thread in threading.enumerate()))
        assert bench.faulty.calls == calls  # What waited was dropped.

    def test_many_threads_that_hang_are_waited_for_together(
        self, open_worker: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_half, "JOIN_SECONDS", 0.5)
        bench = open_worker(load_threads=4)
        saved = bench.save([0, 1])
        bench.faulty.always(Hang(), "put", "get")
        monkeypatch.setattr(bench.faulty, "close", lambda: None)
        loads = [bench.load_job(saved, [6, 5], str(i)) for i in range(4)]
        bench.step(loads=loads, saves=[bench.save_job([2, 3])])
        wait_until(lambda: bench.faulty.calls["get"] >= 4)
        start = time.monotonic()
        bench.worker.shutdown()
        assert time.monotonic() - start < 1.5
        bench.faulty.release()
        wait_until(lambda: not any("KVCacheStore" in thread.name for thread in threading.enumerate()))

    def test_vllm_kills_nobody_who_ends_as_fast_as_he_can(self) -> None:
        closing = max(local_backend.CLOSE_SECONDS, connection.CLOSE_SECONDS)
        longest_answer = 3.0
        assert worker_half.JOIN_SECONDS + longest_answer + closing < launch_plan.WORKER_SHUTDOWN_SECONDS
        assert launch_plan.WORKER_SHUTDOWN_SECONDS < children.GRACE_SECONDS < launch_plan.SHUTDOWN_SECONDS

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

    def test_while_a_call_hangs(self, open_worker: Opener) -> None:
        """Backends give up in bounded time; then the call is answered, and the worker ends."""
        bench = open_worker()
        bench.faulty.always(Hang(0.5), "get_record")
        asked = bench.caller.call(0, LookupCall, "u", NAMESPACE)
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
