"""A vLLM engine in this process, for runs without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric

from userkv.cache import settings
from userkv.core.errors import InvalidSettingError, UserKVError
from userkv.core.sizes import GIB
from userkv.replay.target import Outcome
from userkv.serving import launch_plan, preconditions


class EngineTarget:
    """Runs requests in an AsyncLLM that start() creates and close() shuts down.

    model_dir: the model. users: whether the user-granular cache is on in the engine. engine_args: further arguments
    of vLLM's AsyncEngineArgs by name; ``kv_transfer_config`` may be a mapping. max_tokens: tokens to generate per
    request. timeout_s: seconds until a request counts as failed. vLLM is imported by start() only.
    """

    def __init__(
        self,
        model_dir: Path,
        engine_args: Mapping[str, Any],
        *,
        users: bool = True,
        max_tokens: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        self._model_dir = model_dir
        self._engine_args = dict(engine_args)
        self._users = users
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._engine: Any = None
        self._new_params: Any = None
        self._refusals: tuple[type[Exception], ...] = ()

    async def start(self) -> None:
        """Starts the engine (tens of seconds). Raises InvalidSettingError if vLLM refuses model or arguments."""
        prepare_environment(self._users)
        try:
            # What vLLM imports stays: the collector need not look through it meanwhile, nor when the process ends.
            gc.disable()
            from vllm.config import KVTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.exceptions import VLLMError
            from vllm.sampling_params import SamplingParams
            from vllm.v1.engine.async_llm import AsyncLLM

            gc.freeze()
        except ImportError as error:
            raise InvalidSettingError(f"An offline run needs vLLM, which cannot be imported here ({error}).") from error
        finally:
            gc.enable()
        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        unknown = sorted(self._engine_args.keys() - known)
        if unknown:
            raise InvalidSettingError(f"vLLM has no engine argument {', '.join(unknown)}.")
        arguments = {**_default_arguments(), **self._engine_args}
        try:
            if isinstance(transfer := arguments.get("kv_transfer_config"), Mapping):
                arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
            args = AsyncEngineArgs(model=str(self._model_dir), **arguments)
            self._engine = AsyncLLM.from_engine_args(args)
        except UserKVError:
            raise  # already says what to change
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InvalidSettingError(f"The engine does not start with {self._model_dir}: {reason}") from error
        self._new_params = SamplingParams
        self._refusals = (VLLMError, ValueError)

    async def send(self, prompt_token_ids: list[int], user_id: str | None, history_len: int) -> Outcome:
        """See Target.send. A refusal by vLLM or the cache, a dead engine and a timeout are failures."""
        if self._engine is None:
            raise RuntimeError("EngineTarget.send() before start()")
        users = (
            {"kv_transfer_params": {"user_id": user_id, "history_len": history_len}} if user_id is not None else None
        )
        params = self._new_params(
            max_tokens=self._max_tokens,
            temperature=0.0,
            ignore_eos=True,  # so that every request generates the same number of tokens
            detokenize=False,
            extra_args=users,
        )
        started = time.perf_counter()
        ttft: float | None = None
        cached: int | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                prompt = {"prompt_token_ids": prompt_token_ids}
                async for output in self._engine.generate(prompt, params, f"replay-{next(self._numbers)}"):
                    cached = output.num_cached_tokens
                    if ttft is None and output.outputs[0].token_ids:
                        ttft = time.perf_counter() - started
        except TimeoutError:
            return Outcome.failure(f"no full answer within {self._timeout_s:g} s", time.perf_counter() - started)
        except self._refusals as error:
            reason = " ".join(str(error).split())[:300]
            return Outcome.failure(f"{type(error).__name__}: {reason}", time.perf_counter() - started)
        latency = time.perf_counter() - started
        return Outcome(True, None, len(prompt_token_ids), cached, ttft, latency, None)

    async def metrics(self) -> list[Metric] | None:
        """See Target.metrics. The engine counts in this process."""
        return list(REGISTRY.collect())

    async def close(self) -> None:
        """Shuts the engine and its processes down."""
        if self._engine is not None:
            self._engine.shutdown(timeout=10)
            self._engine = None


def prepare_environment(users: bool) -> None:
    """What ``userkv serve`` sets too; vLLM reads it when it is imported."""
    if users:
        preconditions.check_plugin(os.environ)
    os.environ[settings.ENABLE] = "1" if users else "0"
    # vLLM logs to stdout unless told otherwise, but stdout belongs to the report.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # On CPUs vLLM keeps one core free of the model, and two with a KV connector, but none if the machine has no more:
    # of two cores, engines with a connector would compute on both and others on one. They are to be compared.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "2" if cores > 2 else "0")


def _default_arguments() -> dict[str, Any]:
    if preconditions.vllm_is_for_cpu() and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        # vLLM itself would take most of the machine's memory.
        return {"kv_cache_memory_bytes": int(launch_plan.DEFAULT_KV_CACHE_GIB * GIB)}
    return {}
