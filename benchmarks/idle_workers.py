"""vLLM's scheduler with nobody who computes: the worker's answers are made up, and its time is not counted.

The scheduler, the KV cache manager and the block pool are vLLM's own, with UserKV in them or not; with UserKV, the
connector asks a pool in another process, over the RPC that it always uses.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from userkv.core.request import UserKey
from userkv.core.tokens import as_tokens
from userkv.engine.pool.connector import PoolHandshake, PoolWorkerMetadata
from userkv.engine.pool.wire.lookup_server import MooncakeLookupServer
from userkv.engine.pool.wire.messages import SaveNotice, WorkerInfo
from userkv.engine.pool.worker.lookup_handler import answer
from userkv.records.save_plan import plan_save
from userkv.serving.demo_model import ensure_demo_model
from userkv.store.local import LocalBackend
from userkv.store.regions import region_of
from userkv.store.user_store import MooncakeUserStore

MAX_MODEL_LEN = 70_000
BLOCK_NBYTES = 1 << 20
"""1 MiB per block of 128 tokens, so that 64k tokens are 32 extents of 16 MiB."""

WAIT_SECONDS = 5.0
"""How long an answer of the pool may take until the benchmark gives up."""


def config_of(pool: bool, block_size: int, num_blocks: int) -> VllmConfig:
    """vLLM's configuration of an engine with prefix caching; with ``pool``, UserKV's connector in it."""
    transfer = KVTransferConfig(
        kv_connector="MooncakeUserStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"weights_version": "0"},
    )
    config = EngineArgs(
        model=str(ensure_demo_model()),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_num_seqs=64,
        enable_prefix_caching=True,
        hf_overrides={"max_position_embeddings": MAX_MODEL_LEN},
        kv_transfer_config=transfer if pool else None,
    ).create_engine_config()
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def make_scheduler(config: VllmConfig) -> Any:
    """vLLM's scheduler for that configuration, of the class that the patches in force say."""
    block_size, num_blocks = config.cache_config.block_size, config.cache_config.num_gpu_blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )


@dataclass
class Engine:
    """One scheduler. ``seconds`` and ``cpu`` are what its calls have taken, on the wall and of this thread's time."""

    scheduler: Any
    hasher: Any
    saved: Callable[[int], None] = lambda job_id: None
    seconds: float = 0.0
    cpu: float = 0.0

    def request(self, name: str, prompt: list[int], max_tokens: int = 1, user: dict[str, Any] | None = None) -> Request:
        """What the engine's input thread makes of a request that has arrived; vLLM hashes its blocks here."""
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": user} if user else None
        )
        return Request(name, prompt, params, None, block_hasher=self.hasher)

    def add(self, request: Request) -> None:
        """The request reaches the scheduler."""
        self._timed(self.scheduler.add_request, request)

    def step(self) -> SchedulerOutput:
        """Schedule, have the workers done at once, and tell the scheduler."""
        output: SchedulerOutput = self._timed(self.scheduler.schedule)
        self._timed(self.scheduler.update_from_output, output, self._result(output))
        return output

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        start, cpu = time.perf_counter(), time.thread_time()
        result = call(*args)
        self.cpu += time.thread_time() - cpu
        self.seconds += time.perf_counter() - start
        return result

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        moved = KVConnectorOutput()
        if output.kv_connector_metadata is not None:
            jobs = output.kv_connector_metadata.jobs
            for save in jobs.saves:
                self.saved(save.job_id)
            if jobs.loads:
                moved.kv_connector_worker_meta = PoolWorkerMetadata({job.job_id: (1, True) for job in jobs.loads})
                moved.finished_recving = {job.request_id for job in jobs.loads}
        ids = list(output.num_scheduled_tokens)
        # A token for each prompt that is complete; here every step completes all it computes.
        return ModelRunnerOutput(
            ids, {name: i for i, name in enumerate(ids)}, [[1] for _ in ids], kv_connector_output=moved
        )


@contextmanager
def pool_of(block_size: int) -> Iterator[tuple[str, Connection]]:
    """A worker's side of the pool in another process: its address, and a pipe to it, see :func:`_serve`."""
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{Path(directory) / 'bench' / 'socket'}"
        (Path(directory) / "bench").mkdir()
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(endpoint, theirs, block_size))
        process.start()
        theirs.close()  # So that the pipe ends with the process.
        mine.recv()
        try:
            yield endpoint, mine
        finally:
            mine.send(None)
            process.join()


def attach_pool(engine: Engine, endpoint: str, pipe: Connection) -> str:
    """Connect a scheduler with UserKV's connector to the pool; returns the namespace of its users' KV."""
    connector = engine.scheduler.connector
    connector.set_xfer_handshake_metadata({0: PoolHandshake(WorkerInfo(endpoint, "bench", BLOCK_NBYTES))})
    engine.saved = pipe.send
    namespace: str = connector._namespaces.of(UserKey("anybody"), 0)
    return namespace


def wait_for(done: Callable[[], bool]) -> None:
    """Sleep until something that another thread does is done.

    Raises:
        TimeoutError: it takes too long.

    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("the pool does not answer")
        time.sleep(0.0002)


def _serve(endpoint: str, pipe: Connection, block_size: int) -> None:
    """A pool and a worker that writes nothing. Told a job, it says that it is saved; told a user, it stores him.

    Extents are a byte each: nobody loads them.
    """
    backend = LocalBackend(1 << 30, None, 0)
    store = MooncakeUserStore(backend, 1, 0)
    server = MooncakeLookupServer(endpoint, lambda call: answer(store, call))
    pipe.send(True)
    while (message := pipe.recv()) is not None:
        if isinstance(message, int):
            server.notify(SaveNotice(message, True))
        else:
            _store(store, block_size, *message)
            pipe.send(True)
    server.close()
    backend.close()


def _store(store: MooncakeUserStore, block_size: int, uid: str, namespace: str, tokens: Sequence[int]) -> None:
    ids = iter(range(len(tokens)))
    plan = plan_save(
        None,
        as_tokens(tokens),
        block_size,
        max_extent_blocks=(16 << 20) // BLOCK_NBYTES,
        new_id=lambda: next(ids),
        writer="bench",
        now=time.time(),
    )
    assert plan is not None
    byte = bytearray(1)
    for extent in plan.new_extents:
        store.put_extent(uid, namespace, extent, [region_of(byte)])
    assert store.commit(uid, namespace, plan.record, 0).committed
