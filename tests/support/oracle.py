"""A worker that knows what every KV slot must hold.

It runs vLLM's real scheduler, KV manager and block pool, with UserKV in them, but no model: "computing" a token writes
into its KV slot which prefix it was computed from and for whom. At each step it checks that every slot a request reads
holds the KV of exactly that request's tokens, and that a user's request reads only what was written for that user.
Any wrong block, stale tail, missing copy or premature look-up shows at once, thousands of steps per second.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core as engine_core
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.oracle_pool import OraclePool
from userkv.core.request import UserKey
from userkv.engine.pool.connector import PoolWorkerMetadata
from userkv.engine.pool.scheduler.connector_scheduler import ConnectorScheduler
from userkv.engine.pool.scheduler.history_saver import HistorySaver
from userkv.engine.pool.scheduler.saves import PoolSaves, SaveSettings
from userkv.engine.request_adapter import cache_request_of
from userkv.serving.demo_model import ensure_demo_model

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
SPOILT_TOKEN = 7
"""What a request answers if it was computed from KV that is not there: no right answer contains it."""


@cache
def _config(async_scheduling: bool, pool: str | None) -> VllmConfig:
    options = {"load_async": pool == "async", "use_layerwise": pool == "layerwise", "weights_version": "0"}
    transfer = KVTransferConfig(
        kv_connector="MooncakeUserStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=options,
    )
    config = EngineArgs(
        model=str(ensure_demo_model()),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        enable_prefix_caching=True,
        async_scheduling=async_scheduling,
        kv_transfer_config=transfer if pool else None,
    ).create_engine_config()
    config.cache_config.block_size = BLOCK_SIZE
    config.scheduler_config.async_scheduling = async_scheduling  # vLLM switches it off on CPUs.
    return config


def next_token(prefix: tuple[int, ...]) -> int:
    """The token that this world's model says after a prefix."""
    return sum((i + 1) * token for i, token in enumerate(prefix[-5:])) % 5


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request must answer, whatever the caches do."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


@dataclass
class _WorkerRequest:
    prompt_len: int
    tokens: list[int]
    blocks: list[int]
    owner: UserKey | None
    weights: int


@dataclass(frozen=True)
class _Slot:
    """What a KV slot holds: for whom it was written, from which prefix, by which weights."""

    owner: UserKey | None
    prefix: tuple[int, ...]
    weights: int
    spoilt_by: str = ""
    """The request that wrote it from blocks that it knew not to be loaded; it may, if it does so again later."""


class _NamespaceOfWeights:
    """All users' KV is named after the weights that the oracle's engine has now."""

    def __init__(self, engine: "OracleEngine") -> None:
        self._engine = engine

    def of(self, key: Any, adapter_id: int) -> str:
        return f"weights-{self._engine.weights}"

    def renew(self) -> None:
        """The engine has counted its weights up already."""


@dataclass
class OracleEngine:
    """vLLM's scheduler with the oracle as its worker. Make it while UserKV's patches are in force."""

    num_blocks: int
    async_scheduling: bool
    long_prefill_threshold: int = 0
    policy: str = "fcfs"
    pool: str | None = None
    """``"async"``, ``"sync"`` or ``"layerwise"``: with the pool's connector, loading in this way."""
    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    resumed: int = 0

    def __post_init__(self) -> None:
        config = _config(self.async_scheduling, self.pool)
        config.cache_config.num_gpu_blocks = self.num_blocks
        config.scheduler_config.long_prefill_token_threshold = self.long_prefill_threshold
        config.scheduler_config.policy = self.policy
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(self.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = engine_core.get_request_block_hasher(BLOCK_SIZE, sha256)
        self._slots: dict[tuple[int, int], _Slot] = {}
        self.weights = 0
        self._worker: dict[str, _WorkerRequest] = {}
        self._in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self._count = 0
        self._bad_blocks: set[int] = set()
        self._loading_since: dict[str, int] = {}
        self._settling = False
        self.oracle_pool = OraclePool(BLOCK_SIZE, self._slots, Random(0))
        if self.pool:
            self._attach_pool()

    def _attach_pool(self) -> None:
        """The connector's real scheduler, on a pool whose contents the oracle checks."""
        manager, connector = self.scheduler.kv_cache_manager, self.scheduler.connector
        self._saves = PoolSaves(
            self.oracle_pool,
            manager.block_pool,
            SaveSettings(
                BLOCK_SIZE,
                max_extent_blocks=5,
                max_saves=8,
                max_held_blocks=self.num_blocks // 2,
                ttl_seconds=0,
                writer="oracle",
            ),
        )
        self.oracle_pool.on_saved = self._saves.report_write
        connector.use_scheduler(
            ConnectorScheduler(
                self.oracle_pool,
                self.users,
                _NamespaceOfWeights(self),
                HistorySaver(self._saves, self.users.table),
                save_during_forward=self.pool == "layerwise",
            )
        )

    @property
    def users(self) -> Any:
        return self.scheduler.kv_cache_manager.users

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 1,
        user: dict[str, Any] | None = None,
        *,
        skip_reading: bool = False,
        priority: int = 0,
    ) -> str:
        """Submit a request; ``user`` is its ``kv_transfer_params``."""
        self._count += 1
        request_id = f"r{self._count}"
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": user} if user else None,
            skip_reading_prefix_cache=skip_reading,
        )
        request = Request(request_id, list(prompt), params, None, block_hasher=self._hasher, priority=priority)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.requests.pop(request_id, None)

    def reset(self, running_too: bool) -> bool:
        """New weights: no user request that starts after this may read older KV."""
        for request_id, request in self.requests.items():
            # As far as weights go it runs already: its KV is on its way, or there.
            if request.status != RequestStatus.RUNNING and request.num_computed_tokens:
                self._loading_since.setdefault(request_id, self.weights)
        self.weights += 1
        done: bool = self.scheduler.reset_prefix_cache(reset_running_requests=running_too)
        return done

    def unfinished(self) -> list[str]:
        return list(self.requests)

    def step(self) -> None:
        """Schedule and compute a step; with async scheduling, its result is taken only after the next is scheduled."""
        if self.pool:
            self.oracle_pool.deliver()
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._compute(output)))
        lag = 1 if self.async_scheduling and output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > lag:
            self._take_result()
        self.check()

    def drain(self, max_steps: int = 400) -> None:
        """Run until nothing is left to do. Fails if that takes forever."""
        for _ in range(max_steps):
            if not self.requests:
                break
            self.step()
        assert not self.requests, f"no progress: {self.requests.keys()} never finish"
        while self._in_flight:
            self._take_result()
        if self.pool:
            self._settle()
        self.check()

    def _settle(self) -> None:
        """Let everything that is under way between engine and pool end."""
        for _ in range(50):
            self.oracle_pool.deliver(everything=True)
            self._settling = True
            self.step()
            while self._in_flight:
                self._take_result()
            self._settling = False
            if self.oracle_pool.quiet and not self.scheduler.connector.has_pending_push_work():
                break
        assert self.oracle_pool.quiet
        self.step()
        assert not self._saves.held_blocks()

    def check(self) -> None:
        """Every block is free or referenced exactly as often as its owners say; all other invariants hold too."""
        self.users.check_integrity()
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        owners: Counter[int] = Counter()
        for blocks in manager.coordinator.single_type_managers[0].req_to_blocks.values():
            owners.update(block.block_id for block in blocks)
        for entry in self.users.table.user_to_blocks.values():
            owners.update(block.block_id for block in entry.blocks)
            assert all(block.block_hash is None for block in entry.blocks)
        if self.pool:
            owners.update(block.block_id for block in self._saves.held_blocks())
        for _, deferred in self.scheduler.deferred_frees:  # A step in flight may still write to them.
            owners.update(block.block_id for block in deferred)
        for block in pool.blocks[1:]:
            assert block.ref_cnt == owners[block.block_id], f"{block} has {owners[block.block_id]} owners"
        free = sum(block.ref_cnt == 0 for block in pool.blocks[1:])
        assert pool.get_num_free_blocks() == free
        assert 0.0 <= manager.usage <= 1.0

    def _take_result(self) -> None:
        output, result = self._in_flight.pop(0)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.request_id in self.outputs:
                    self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.requests.pop(one.request_id, None)

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._worker.pop(request_id, None)
        for copy in output.kv_cache_block_copies or ():
            for slot in range(BLOCK_SIZE):
                if (copy.src_block_id, slot) in self._slots:
                    self._slots[copy.dst_block_id, slot] = self._slots[copy.src_block_id, slot]
        started = self._admit(output)
        moved = KVConnectorOutput()
        if self.pool:
            self._start_transfers(output, moved)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request, start = self._worker[request_id], started[request_id]
            for position in range(start, start + scheduled):
                prefix = tuple(request.tokens[: position + 1])
                self._slots[self._slot(request, position)] = _Slot(request.owner, prefix, self.weights)
        # A forward pass writes the KV of all its tokens before it reads any, so a request may read what another one
        # of the same step writes (vLLM's own prefix cache relies on it).
        sampled = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request, start, end = self._worker[request_id], started[request_id], started[request_id] + scheduled
            spoilt = any(self._reads_spoilt(request_id, position) for position in range(end))
            if spoilt:
                for position in range(start, end):
                    self._slots[self._slot(request, position)] = _Slot(request.owner, (), self.weights, request_id)
            if end == len(request.tokens):
                request.tokens.append(SPOILT_TOKEN if spoilt else next_token(tuple(request.tokens)))
                sampled.append([request.tokens[-1]])
            else:
                sampled.append([])
        if self.pool:
            self._end_transfers(moved)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            ids, {request_id: i for i, request_id in enumerate(ids)}, sampled, kv_connector_output=moved
        )

    def _start_transfers(self, output: SchedulerOutput, moved: KVConnectorOutput) -> None:
        ended, bad = self.oracle_pool.start_step(output.kv_connector_metadata.jobs, self.pool != "async")
        self._report(moved, ended, bad)

    def _end_transfers(self, moved: KVConnectorOutput) -> None:
        ended, bad, received = self.oracle_pool.end_step(self._settling)
        self._report(moved, ended, bad)
        if self.pool == "async":
            moved.finished_recving = received or None

    def _report(self, moved: KVConnectorOutput, ended: dict[int, bool], bad: set[int]) -> None:
        moved.invalid_block_ids |= bad
        self._bad_blocks |= bad
        if ended:
            reports = PoolWorkerMetadata({job_id: (1, ok) for job_id, ok in ended.items()})
            before = moved.kv_connector_worker_meta
            moved.kv_connector_worker_meta = reports if before is None else before.aggregate(reports)

    def _reads_spoilt(self, request_id: str, position: int) -> bool:
        """Check the KV that a request reads at a position; whether it is what a failed load of its own left there."""
        request = self._worker[request_id]
        block, offset = self._slot(request, position)
        slot = self._slots.get((block, offset))
        if slot is None and block in self._bad_blocks:
            return True
        assert slot is not None, f"{request_id} reads KV that nobody has written"
        if slot.spoilt_by == request_id:
            return True
        assert slot.prefix == tuple(request.tokens[: position + 1]), f"{request_id} reads KV of other tokens"
        assert slot.owner == request.owner, f"{request_id} reads KV of {slot.owner}"
        assert slot.weights >= request.weights or slot.owner is None, f"{request_id} reads KV of old weights"
        return False

    def _admit(self, output: SchedulerOutput) -> dict[str, int]:
        """Take over the step's block tables; returns where each request's computation starts."""
        started = {}
        for new in output.scheduled_new_reqs:
            lookup = cache_request_of(self.scheduler.requests[new.req_id])
            owner = lookup.key if lookup else None
            tokens, blocks = list(new.prompt_token_ids), list(new.block_ids[0])
            weights = self._loading_since.pop(new.req_id, self.weights)
            self._worker[new.req_id] = _WorkerRequest(len(tokens), tokens, blocks, owner, weights)
            started[new.req_id] = new.num_computed_tokens
            self.cached[new.req_id] = new.num_computed_tokens
        known = output.scheduled_cached_reqs
        for i, request_id in enumerate(known.req_ids):
            request = self._worker[request_id]
            if request_id in known.all_token_ids:
                request.tokens = list(known.all_token_ids[request_id])
            # As in vLLM's worker: output that came from a failed load is taken back.
            del request.tokens[request.prompt_len + known.num_output_tokens[i] :]
            blocks = list((known.new_block_ids[i] or ([],))[0])
            if request_id in known.resumed_req_ids:
                request.blocks, request.weights = blocks, self._loading_since.pop(request_id, self.weights)
                self.resumed += 1
            else:
                request.blocks += blocks
            started[request_id] = known.num_computed_tokens[i]
        return started

    @staticmethod
    def _slot(request: _WorkerRequest, position: int) -> tuple[int, int]:
        return request.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
