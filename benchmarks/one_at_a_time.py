"""A real engine with a pool that is asked one request at a time; for the benchmarks of single requests."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from userkv.serving.demo_model import VOCAB_SIZE, ensure_model


@contextmanager
def pool_engine(model: dict[str, int], name: str, pool: dict[str, Any], tokens: int, blocks: int) -> Iterator[Any]:
    """vLLM's ``LLM`` in float32; it starts within the ``with`` block and ends with it.

    Args:
        model: what differs from the demo model.
        name: of the model.
        pool: options of the connector.
        tokens: the longest request; a step computes as many.
        blocks: KV blocks of 128 tokens.

    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="MooncakeUserStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=pool,
    )
    llm = LLM(
        str(ensure_model(model, name=name)),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        async_scheduling=False,
        kv_cache_memory_bytes=2**29,
        max_model_len=tokens,
        max_num_batched_tokens=tokens,
        num_gpu_blocks_override=blocks,
        kv_transfer_config=transfer,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


class Asker:
    """Sends one request at a time, with fresh candidates.

    Args:
        llm: the engine.
        candidates: tokens behind each history.
        seed: of all tokens.

    """

    def __init__(self, llm: Any, candidates: int, seed: int = 1) -> None:
        self._llm = llm
        self._candidates = candidates
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        return [self._random.randrange(16, VOCAB_SIZE) for _ in range(count)]

    def ask(self, user: str, history: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens came from a cache."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"user_id": user, "history_len": len(history)}}
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        prompt = {"prompt_token_ids": history + self.tokens(self._candidates)}
        start = time.perf_counter()
        (output,) = self._llm.generate([prompt], [params], use_tqdm=False)
        return time.perf_counter() - start, output.num_cached_tokens
