"""Transfer threads: they move KV while the model computes."""

import logging
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from userkv.engine.pool.wire.messages import LoadJob, SaveJob
from userkv.engine.pool.worker.mooncake_engine import Loaded, MooncakeEngine
from userkv.store.backend import StoreError

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 2.0

J = TypeVar("J")


class KVTransferThread(threading.Thread, Generic[J]):
    """Takes jobs from a queue, one at a time. Every job that was accepted ends with exactly one report.

    Args:
        name: of the thread.
        jobs: the queue; several threads may share one.
        idle_seconds: :meth:`idle` is called when nothing came for so long.

    """

    def __init__(self, name: str, jobs: "queue.Queue[J | None]", idle_seconds: float | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs = jobs
        self._idle_seconds = idle_seconds

    def run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_seconds)
            except queue.Empty:
                self.idle()
                continue
            if job is None:
                return
            self.transfer(job)

    @abstractmethod
    def transfer(self, job: J) -> None:
        """Do a job and report it. Must not raise."""

    def idle(self) -> None:
        """Something to do when there is no job."""


class LoadTask(NamedTuple):
    """A job, or one layer of it."""

    job: LoadJob
    layer: int | None


class SaveTask(NamedTuple):
    """A job, or one layer of it that is complete after a mark in the computation."""

    job: SaveJob
    layer: int | None
    after: Any


class KVCacheStoreRecvingThread(KVTransferThread[LoadTask]):
    """Loads from the pool.

    Args:
        name: of the thread.
        jobs: shared by all receiving threads.
        engine: moves the bytes.
        report: told the outcome and the seconds of each task.

    """

    def __init__(
        self,
        name: str,
        jobs: "queue.Queue[LoadTask | None]",
        engine: MooncakeEngine,
        report: Callable[[LoadTask, Loaded, float], None],
    ) -> None:
        super().__init__(name, jobs)
        self._engine = engine
        self._report = report

    def transfer(self, job: LoadTask) -> None:
        start = time.perf_counter()
        try:
            loaded = self._engine.load(job.job, job.layer)
        except Exception as error:
            logger.exception("loading failed in a way that it should not")
            loaded = Loaded(bad_blocks=set(job.job.block_ids), error=StoreError(str(error)))
        self._report(job, loaded, time.perf_counter() - start)


class KVCacheStoreSendingThread(KVTransferThread[SaveTask]):
    """Saves to the pool, and cleans up there now and then.

    Args:
        jobs: what to save.
        engine: moves the bytes.
        report: told the bytes (-1 if it failed) and the seconds of each task.
        sweep: tries again to remove what could not be removed before.

    """

    def __init__(
        self,
        jobs: "queue.Queue[SaveTask | None]",
        engine: MooncakeEngine,
        report: Callable[[SaveTask, int, float], None],
        sweep: Callable[[], object],
    ) -> None:
        super().__init__("KVCacheStoreSendingThread", jobs, idle_seconds=SWEEP_SECONDS)
        self._engine = engine
        self._report = report
        self._sweep = sweep
        self._next_sweep = 0.0

    def transfer(self, job: SaveTask) -> None:
        start = time.perf_counter()
        try:
            nbytes = self._engine.save(job.job, job.layer, job.after)
        except StoreError as error:
            logger.debug("a save was given up: %s", error)
            nbytes = -1
        except Exception:
            logger.exception("saving failed in a way that it should not")
            nbytes = -1
        self._report(job, nbytes, time.perf_counter() - start)
        self.idle()

    def idle(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            try:
                self._sweep()
            except Exception:
                logger.exception("cleaning up failed in a way that it should not")
