"""The connector in a worker: runs the jobs of each step, and answers the scheduler beside it."""

import logging
import queue
import threading
import time
from typing import Any

from userkv.engine.pool.metrics import PoolStats
from userkv.engine.pool.wire.lookup_server import MooncakeLookupServer
from userkv.engine.pool.wire.messages import SaveJob, SaveNotice, StepJobs
from userkv.engine.pool.worker.backend_gauges import PoolGauges
from userkv.engine.pool.worker.kv_memory import KVMemory
from userkv.engine.pool.worker.lookup_handler import answer
from userkv.engine.pool.worker.mooncake_engine import Loaded, MooncakeEngine
from userkv.engine.pool.worker.transfer_threads import (
    KVCacheStoreRecvingThread,
    KVCacheStoreSendingThread,
    LoadTask,
    SaveTask,
)
from userkv.store.guarded import GuardedBackend
from userkv.store.user_store import MooncakeUserStore

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0
"""How long shutdown waits for transfers that are running, for all of them together; see ``serving/launch_plan.py``."""


class ConnectorWorker:
    """What the connector does in a worker. Called by the thread that computes, but for what says otherwise.

    Args:
        engine: moves the bytes.
        store: the users' objects of this worker.
        backend: the pool, to watch and to close.
        memory: marks points of the computation.
        endpoint: where the scheduler reaches this worker.
        load_async: loads run between steps; otherwise a step's loads end before its computation starts or, layerwise,
            before each layer's.
        layerwise: one object per layer.
        prefetch_layers: how many layers a load runs ahead of the computation.
        load_threads: loads at once.
        max_queued_saves: saves that may wait; more are dropped.

    """

    def __init__(
        self,
        engine: MooncakeEngine,
        store: MooncakeUserStore,
        backend: GuardedBackend,
        memory: KVMemory,
        endpoint: str,
        *,
        load_async: bool,
        layerwise: bool,
        prefetch_layers: int,
        load_threads: int,
        max_queued_saves: int,
    ) -> None:
        self.layers = engine.layers
        self._engine = engine
        self._backend = backend
        self._gauges = PoolGauges(backend)
        self._memory = memory
        self._load_async = load_async
        self._layerwise = layerwise
        self._prefetch_layers = prefetch_layers
        self._lock = threading.Lock()
        self._layer_loaded = threading.Condition(self._lock)
        self._stats = PoolStats()
        self._loads: dict[int, _Progress] = {}
        self._ended_loads: dict[int, bool] = {}
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._layers_left: list[int] = []
        self._next_layer = 0
        self._layers_computed = 0
        self._step = StepJobs()
        self._saves: dict[int, _Progress] = {}
        self._load_queue: queue.Queue[LoadTask | None] = queue.Queue()
        self._save_queue: queue.Queue[SaveTask | None] = queue.Queue(max_queued_saves * self._tasks_per_save)
        self._server = MooncakeLookupServer(endpoint, lambda call: answer(store, call))
        self._threads: list[threading.Thread] = [
            KVCacheStoreRecvingThread(f"KVCacheStoreRecvingThread-{i}", self._load_queue, engine, self._task_loaded)
            for i in range(load_threads)
        ]
        self._threads.append(KVCacheStoreSendingThread(self._save_queue, engine, self._task_saved, store.sweep))
        for thread in self._threads:
            thread.start()

    @property
    def _tasks_per_save(self) -> int:
        return self._engine.num_layers if self._layerwise else 1

    def begin_step(self, jobs: StepJobs) -> None:
        """Take the jobs of the step that is about to be computed."""
        self._step = jobs
        self._layers_computed = 0
        self._layers_left = [len(jobs.loads)] * self._engine.num_layers
        self._next_layer = 0

    def start_loads(self) -> None:
        """Start the step's loads. Without ``load_async``, and not layerwise, they are over when this returns."""
        jobs = self._step.loads
        for job in jobs:
            self._loads[job.job_id] = _Progress(self._engine.num_layers if self._layerwise else 1)
        if self._layerwise:
            if jobs:
                self._prefetch(0)  # Alone, since the computation waits for it.
                self._wait_for_loads(0)
                self._prefetch(self._prefetch_layers)
            return
        for job in jobs:
            self._load_queue.put(LoadTask(job, None))
        if not self._load_async:
            with self._layer_loaded:
                self._layer_loaded.wait_for(lambda: not self._loads)

    def wait_for_layer(self, layer: int) -> None:
        """The step is about to attend in a layer, whose loads are over by now: start those of layers further on."""
        if self._layerwise and self._step.loads:
            self._prefetch(layer + 1 + self._prefetch_layers)
            self._wait_for_loads(layer)  # Over already, if the model computes its layers in their order.

    def layer_computed(self, layer: int) -> None:
        """The step has attended in a layer (or enqueued that): save it where that is asked for.

        Returns when the loads of the *next* layer are over, too: vLLM writes the step's own KV of that layer before it
        asks us to wait for it. If the last block were loaded then, it would overwrite what has just been written behind
        the history's end.
        """
        if not self._layerwise:
            return
        self._layers_computed += 1
        mark = None
        for job in self._step.saves:
            if job.during_forward:
                mark = mark or self._memory.mark()
                self._enqueue_save(job, layer, mark)
        if self._step.loads and layer + 1 < self._engine.num_layers:
            self._wait_for_loads(layer + 1)

    def end_step(self) -> None:
        """The step's computation is over (or enqueued): start the saves that waited for it."""
        jobs, self._step = self._step, StepJobs()
        for job in jobs.saves:
            if not job.during_forward:
                for layer in range(self._engine.num_layers) if self._layerwise else (None,):
                    self._enqueue_save(job, layer, None)
                continue
            # A step that did not run through the model after all has left layers out.
            for layer in range(self._layers_computed, self._engine.num_layers):
                self._note_save(job)
                self._task_saved(SaveTask(job, layer, None), -1, 0.0)

    def take_received(self) -> set[str]:
        """Requests whose asynchronous load is over, well or not."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        """Blocks that failed to load, among those of requests in :meth:`take_received` or of this step."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> dict[int, bool]:
        """Loads that are over, and whether they succeeded."""
        with self._lock:
            ended, self._ended_loads = self._ended_loads, {}
        return ended

    def take_stats(self) -> PoolStats | None:
        """Figures since the last call."""
        with self._lock:
            stats, self._stats = self._stats, PoolStats()
        stats.set(pool_load_queue=self._load_queue.qsize(), pool_save_queue=self._save_queue.qsize())
        self._gauges.add_to(stats)
        return stats

    def shutdown(self) -> None:
        """Drop what waits, let what runs end, and stop answering. Idempotent."""
        threads, self._threads = self._threads, []
        if not threads:
            return  # The queues hold what tells a thread that hangs to end when it comes back.
        _clear(self._load_queue)
        _clear(self._save_queue)
        for thread in threads:
            saves = isinstance(thread, KVCacheStoreSendingThread)
            (self._save_queue if saves else self._load_queue).put(None)
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in threads:
            thread.join(deadline - time.monotonic())
        self._engine.close()
        self._server.close()
        self._backend.close()  # Last: it writes down what is only in memory.

    def _wait_for_loads(self, layer: int) -> None:
        with self._layer_loaded:
            self._layer_loaded.wait_for(lambda: self._layers_left[layer] == 0)

    def _prefetch(self, up_to: int) -> None:
        """Start the loads of all layers up to one, as far as they are not started."""
        last = min(up_to, self._engine.num_layers - 1)
        while self._next_layer <= last:
            for job in self._step.loads:
                self._load_queue.put(LoadTask(job, self._next_layer))
            self._next_layer += 1

    def _enqueue_save(self, job: SaveJob, layer: int | None, after: Any) -> None:
        progress = self._note_save(job)
        try:
            self._save_queue.put_nowait(SaveTask(job, layer, after))
        except queue.Full:
            progress.dropped = True
            self._task_saved(SaveTask(job, layer, after), -1, 0.0)

    def _note_save(self, job: SaveJob) -> "_Progress":
        with self._lock:
            return self._saves.setdefault(job.job_id, _Progress(self._tasks_per_save))

    def _task_loaded(self, task: LoadTask, loaded: Loaded, seconds: float) -> None:
        """On a transfer thread."""
        if loaded.error is not None:
            logger.debug("a load failed: %s", loaded.error)
        with self._layer_loaded:
            progress = self._loads[task.job.job_id]
            progress.add(loaded.nbytes, seconds, loaded.error is None)
            self._bad_blocks |= loaded.bad_blocks
            if task.layer is not None:
                self._layers_left[task.layer] -= 1
            if progress.left == 0:
                del self._loads[task.job.job_id]
                self._ended_loads[task.job.job_id] = progress.ok
                if progress.ok:
                    self._stats.observe(load_bytes=progress.nbytes, load_seconds=progress.seconds)
                if self._load_async:
                    self._received.add(task.job.request_id)
            self._layer_loaded.notify_all()

    def _task_saved(self, task: SaveTask, nbytes: int, seconds: float) -> None:
        """On the sending thread, or where a full queue was noticed."""
        with self._lock:
            progress = self._saves[task.job.job_id]
            progress.add(max(nbytes, 0), seconds, nbytes >= 0)
            if progress.left:
                return
            del self._saves[task.job.job_id]
            if progress.ok:
                self._stats.observe(save_bytes=progress.nbytes, save_seconds=progress.seconds)
        self._server.notify(SaveNotice(task.job.job_id, progress.ok, progress.dropped))


class _Progress:
    """A load or save that consists of several tasks (one per layer)."""

    __slots__ = ("dropped", "left", "nbytes", "ok", "seconds")

    def __init__(self, tasks: int) -> None:
        self.left = tasks
        self.nbytes = 0
        self.seconds = 0.0
        self.ok = True
        self.dropped = False

    def add(self, nbytes: int, seconds: float, ok: bool) -> None:
        """One task is over."""
        self.left -= 1
        self.nbytes += nbytes
        self.seconds += seconds
        self.ok &= ok


def _clear(waiting: "queue.Queue[Any]") -> None:
    while True:
        try:
            waiting.get_nowait()
        except queue.Empty:
            return
