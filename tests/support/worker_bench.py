"""The worker's half of the connector over a real store and KV tensors: vLLM's calls in vLLM's order, and no vLLM."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.faulty_backend import FaultyBackend
from tests.support.kv_layouts import BLOCKS, KINDS, KV, in_order
from tests.support.lookup_rpc import Caller, ipc_endpoint, wait_until
from tests.support.memory_backend import MemoryBackend
from userkv.engine.pool.wire.messages import LoadJob, SaveJob, SaveNotice, StepJobs
from userkv.engine.pool.worker.connector_worker import ConnectorWorker
from userkv.engine.pool.worker.kv_layout import KVLayout
from userkv.engine.pool.worker.kv_memory import HostKVMemory, KVMemory, StagedKVMemory
from userkv.engine.pool.worker.mooncake_engine import MooncakeEngine
from userkv.records.load_plan import ExtentRead
from userkv.records.record import Extent
from userkv.store.backend import PoolBackend, Region, Tier
from userkv.store.breaker import CircuitBreaker
from userkv.store.guarded import GuardedBackend
from userkv.store.user_store import MooncakeUserStore

NAMESPACE = "n"
MODES: dict[str, dict[str, bool]] = {
    "async": {},
    "sync": {"load_async": False},
    "layerwise": {"load_async": False, "layerwise": True},
}
SIZE = 2
"""Blocks of an extent."""


class WorkerBench:
    """A worker with the KV of ``BLOCKS`` blocks, which differ from each other."""

    def __init__(
        self,
        backend: PoolBackend,
        kv: KV,
        *,
        layerwise: bool = False,
        load_async: bool = True,
        staged: bool = False,
        prefetch_layers: int = 1,
        load_threads: int = 2,
        max_queued_saves: int = 8,
    ) -> None:
        self.kv = kv
        self.num_layers = len(kv.tensors)
        self.faulty = FaultyBackend(backend)
        guarded = GuardedBackend(self.faulty, CircuitBreaker(first_pause=0.05, max_pause=0.05))
        layout = KVLayout.of(kv.tensors, BLOCKS)
        self.memory: KVMemory = StagedKVMemory(kv.tensors, None) if staged else HostKVMemory(layout.largest_piece, 8)
        self.store = MooncakeUserStore(guarded, 1, 0, self.num_layers if layerwise else 0)
        self.engine = MooncakeEngine(self.store, layout, self.memory, layerwise=layerwise, parallel_gets=2, helpers=2)
        endpoint = ipc_endpoint()
        self.worker = ConnectorWorker(
            self.engine,
            self.store,
            guarded,
            self.memory,
            endpoint,
            load_async=load_async,
            layerwise=layerwise,
            prefetch_layers=prefetch_layers,
            load_threads=load_threads,
            max_queued_saves=max_queued_saves,
        )
        self.caller = Caller(endpoint, timeout=2.0)
        self.received: list[str] = []
        self.bad: list[int] = []
        self.reports: dict[int, bool] = {}
        self._ids = iter(range(1, 10_000))

    def close(self) -> None:
        """End both halves."""
        self.caller.client.close()
        self.faulty.clear()
        self.worker.shutdown()

    def save_job(self, block_ids: Sequence[int], *, live: int = -1, during_forward: bool = False) -> SaveJob:
        """Write blocks, as the first ones of a history."""
        job_id = next(self._ids)
        extents = tuple(
            (
                Extent(1000 * job_id + first, first, len(block_ids[first : first + SIZE])),
                tuple(block_ids[first : first + SIZE]),
            )
            for first in range(0, len(block_ids), SIZE)
        )
        return SaveJob(job_id, "u", NAMESPACE, extents, live, during_forward)

    def load_job(self, saved: SaveJob, block_ids: Sequence[int | None], request: str = "r") -> LoadJob:
        """Read what ``saved`` wrote into other blocks; ``None``: not this one."""
        targets = [block for block in block_ids if block is not None]
        wanted = [None if block is None else targets.index(block) for block in block_ids]
        reads = tuple(
            ExtentRead(extent, tuple(wanted[extent.first_block : extent.end_block])) for extent, _ in saved.extents
        )
        return LoadJob(next(self._ids), request, "u", NAMESPACE, reads, tuple(targets))

    def step(
        self,
        loads: Iterable[LoadJob] = (),
        saves: Iterable[SaveJob] = (),
        compute: Callable[[int], None] | None = None,
        layers: int | None = None,
    ) -> float:
        """A step of the engine; ``compute`` is the model's work on a layer. Returns its seconds."""
        start = time.monotonic()
        self.worker.begin_step(StepJobs(list(loads), list(saves)))
        self.worker.start_loads()
        for layer in range(self.num_layers if layers is None else layers):
            self.worker.wait_for_layer(layer)
            if compute is not None:
                compute(layer)
            self.worker.layer_computed(layer)
        self.worker.end_step()
        self.poll()
        return time.monotonic() - start

    def poll(self) -> tuple[set[str], set[int]]:
        """What vLLM asks at the end of a step, in its order."""
        received = self.worker.take_received()
        bad = self.worker.take_bad_blocks()
        self.reports |= self.worker.take_reports()
        self.received += sorted(received)
        self.bad += sorted(bad)
        return received, bad

    def save(self, block_ids: Sequence[int], **how: Any) -> SaveJob:
        """Write blocks and wait for the notice."""
        job = self.save_job(block_ids, **how)
        self.step(saves=[job])
        assert self.outcome(job)
        return job

    def outcome(self, job: SaveJob) -> bool:
        """How a save ended, when it has."""
        wait_until(lambda: any(notice.job_id == job.job_id for _, notice in self.caller.notices))
        (notice,) = [notice for _, notice in self.caller.notices if notice.job_id == job.job_id]
        return notice.ok

    def notices(self) -> list[SaveNotice]:
        """All notices so far."""
        return [notice for _, notice in self.caller.notices]

    def loaded(self, job: LoadJob) -> bool:
        """How a load ended, when it has."""

        def reported() -> bool:
            self.poll()
            return job.job_id in self.reports

        wait_until(reported)
        return self.reports[job.job_id]

    def snapshot(self) -> list[list[torch.Tensor]]:
        """All KV, by layer and block."""
        return [[self.kv.block(layer, block).clone() for block in range(BLOCKS)] for layer in range(self.num_layers)]

    def assert_blocks(self, before: list[list[torch.Tensor]], moved: dict[int, int], but: Sequence[int] = ()) -> None:
        """Blocks hold what others held before, and all others what they held themselves, except for ``but``."""
        for layer in range(self.num_layers):
            for block in set(range(BLOCKS)) - set(but):
                assert torch.equal(self.kv.block(layer, block), before[layer][moved.get(block, block)]), (layer, block)


class GatedBackend(MemoryBackend):
    """Reads and writes of layers wait until the test lets them through. ``seen``: layers that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.reading: list[int] = []
        self.writing: list[int] = []
        self._gates: dict[tuple[str, int], threading.Event] = {}

    def hold(self, kind: str, *layers: int) -> None:
        """Let ``get`` or ``put`` of some layers wait."""
        for layer in layers:
            self._gates[kind, layer] = threading.Event()

    def let(self, kind: str, layer: int) -> None:
        """Let one through."""
        self._gates[kind, layer].set()

    def put(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        self._pass("put", key, self.writing)
        return super().put(user, key, parts)

    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        self._pass("get", key, self.reading)
        return super().get(user, key, parts)

    def _pass(self, kind: str, key: str, seen: list[int]) -> None:
        layer = int(key.split("@")[5])
        seen.append(layer)
        gate = self._gates.get((kind, layer))
        assert gate is None or gate.wait(10), "a test has forgotten to let this through"


Opener = Callable[..., WorkerBench]


@contextmanager
def workers() -> Iterator[Opener]:
    """Makes workers and ends them; no thread may die of an exception meanwhile."""
    benches: list[WorkerBench] = []

    def make(
        backend: PoolBackend | None = None, kind: str = "LBHNC", layers: int = 2, **options: object
    ) -> WorkerBench:
        kv = in_order("LBHNC", layers=layers) if kind == "LBHNC" else KINDS[kind](BLOCKS)
        benches.append(WorkerBench(backend or MemoryBackend(), kv, **options))  # type: ignore[arg-type]
        return benches[-1]

    died: list[object] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))
        yield make
        for bench in benches:
            bench.close()
    assert died == []


@contextmanager
def running(function: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run something beside the test."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(10)
        assert not thread.is_alive()
