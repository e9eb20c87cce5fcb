"""Loads that read their extents with two threads: both end before the load does, and the first failure counts."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.support.lookup_rpc import wait_until
from tests.support.memory_backend import MemoryBackend
from tests.support.worker_bench import SIZE, Opener, workers
from userkv.engine.pool.wire.messages import LoadJob
from userkv.engine.pool.worker.mooncake_engine import Loaded, MooncakeEngine
from userkv.store.backend import ObjectMissingError, Region, Tier

FIRST, SECOND, THIRD = 0, 1, 2


class TwoReaders(MemoryBackend):
    """The first two gets wait until both have begun; those of ``held`` extents until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2, timeout=10)
        self.failing: set[int] = set()
        self.held: dict[int, threading.Event] = {}
        self.seen: list[int] = []

    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        extent = list(self.objects).index(key)
        self.seen.append(extent)
        if extent in (FIRST, SECOND):
            self.both.wait()
        if extent in self.held:
            assert self.held[extent].wait(10)
        if extent in self.failing:
            raise ObjectMissingError("gone")
        return super().get(user, key, parts)


@pytest.fixture
def open_worker() -> Iterator[Opener]:
    with workers() as make:
        yield make


def load_in_thread(engine: MooncakeEngine, job: LoadJob) -> tuple[threading.Thread, list[Loaded]]:
    results: list[Loaded] = []
    thread = threading.Thread(target=lambda: results.append(engine.load(job)))
    thread.start()
    return thread, results


@pytest.mark.parametrize("failing", [FIRST, SECOND])
def test_a_load_that_fails_ends_after_both_threads(open_worker: Opener, failing: int) -> None:
    backend = TwoReaders()
    bench = open_worker(backend)
    saved = bench.save([0, 1, 2, 3, 4, 5])
    assert SIZE == 2
    job = bench.load_job(saved, [5, 4, 3, 2, 1, 0])
    other = SECOND if failing == FIRST else FIRST
    backend.failing, backend.held = {failing}, {other: threading.Event()}
    thread, results = load_in_thread(bench.engine, job)
    wait_until(lambda: len(backend.seen) == 2)
    thread.join(0.2)
    assert thread.is_alive()  # The other thread still writes to the request's blocks.
    backend.held[other].set()
    thread.join(10)
    (loaded,) = results
    assert isinstance(loaded.error, ObjectMissingError)
    assert loaded.bad_blocks == ({5, 4, 3, 2, 1, 0} if failing == FIRST else {3, 2, 1, 0})
    assert THIRD not in backend.seen  # In vain after a failure.


def test_the_first_failure_counts_whichever_comes_first(open_worker: Opener) -> None:
    backend = TwoReaders()
    bench = open_worker(backend)
    saved = bench.save([0, 1, 2, 3])
    job = bench.load_job(saved, [3, 2, 1, 0])
    backend.failing, backend.held = {FIRST, SECOND}, {FIRST: threading.Event()}
    thread, results = load_in_thread(bench.engine, job)
    wait_until(lambda: len(backend.seen) == 2)
    thread.join(0.1)  # Time for the second to fail.
    backend.held[FIRST].set()
    thread.join(10)
    assert results[0].bad_blocks == {0, 1, 2, 3}


def test_many_loads_at_once_share_the_helpers(open_worker: Opener) -> None:
    bench = open_worker(MemoryBackend())
    saved = bench.save([0, 1, 2])
    before = bench.snapshot()
    threads = [load_in_thread(bench.engine, bench.load_job(saved, [4, 5, 6])) for _ in range(4)]
    for thread, results in threads:
        thread.join(10)
        assert results[0].error is None
        assert not results[0].bad_blocks
    bench.assert_blocks(before, {4: 0, 5: 1, 6: 2})
