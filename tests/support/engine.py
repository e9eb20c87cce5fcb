"""Real offline engines with the user cache, and what tests ask them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.support.patching import put_users_into_vllm
from userkv.serving.demo_model import VOCAB_SIZE, ensure_demo_model

TOLERANCE = 1e-4
"""Largest difference of a log-probability, with and without the cache, in float32.

The same sums are added up in another order when a prompt is computed in other pieces; on this model that changes the
log-probabilities by up to 1e-5. KV of a single wrong token changes them by 1e-2 and more.
"""


@dataclass(frozen=True)
class Ask:
    """One request of a test."""

    history: list[int]
    candidates: list[int]
    user: str | None = None
    max_tokens: int = 1
    n: int = 1

    @property
    def prompt(self) -> list[int]:
        return [*self.history, *self.candidates]


@dataclass(frozen=True)
class Answer:
    """What came back: sampled tokens, and at each position the log-probabilities of the likeliest tokens."""

    cached: int
    tokens: list[int]
    logprobs: list[dict[int, float]]

    def equals(self, other: "Answer") -> bool:
        return self.tokens == other.tokens and all(
            math.isclose(value, theirs[token], rel_tol=0, abs_tol=TOLERANCE)
            for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
            for token, value in mine.items()
            if token in theirs
        )


class Engine:
    """A real vLLM engine in processes of its own."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def ask(self, *asks: Ask) -> list[Answer]:
        """Submit requests all at once and wait for all answers."""
        return [answer for output in self._generate(asks, cache=True) for answer in output]

    def ask_without_cache(self, *asks: Ask) -> list[Answer]:
        """The same requests, one by one, each computed from its first token to its last."""
        return [answer for ask in asks for output in self._generate([ask], cache=False) for answer in output]

    def _generate(self, asks: Any, cache: bool) -> Iterator[list[Answer]]:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        params = [sampling_params(ask, cache) for ask in asks]
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            yield [
                Answer(
                    output.num_cached_tokens,
                    list(choice.token_ids),
                    [{token: entry.logprob for token, entry in step.items()} for step in choice.logprobs],
                )
                for choice in output.outputs
            ]


def sampling_params(ask: Ask, cache: bool = True) -> Any:
    """vLLM's parameters of a request."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"user_id": ask.user, "history_len": len(ask.history)}}
    return SamplingParams(
        n=ask.n,
        max_tokens=ask.max_tokens,
        temperature=0 if ask.n == 1 else 1,  # vLLM refuses several greedy answers; with top_k=1 they are greedy too.
        top_k=1,
        ignore_eos=True,
        logprobs=5,
        extra_args=extra if cache and ask.user is not None else None,
        skip_reading_prefix_cache=not cache,
    )


@contextmanager
def start_engine(**options: Any) -> Iterator[Engine]:
    """An engine with the demo model in float32; ``options`` are those of vLLM's ``LLM``."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        put_users_into_vllm(monkeypatch)
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        llm = LLM(
            str(ensure_demo_model()),
            dtype="float32",
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_cache_memory_bytes=2**26,
            **{"enforce_eager": True, **options},
        )
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()


def metric(name: str, **labels: str) -> float:
    """A metric of this process, over all labels but those given; 0 if it does not exist yet."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def random_tokens(rng: Any, count: int) -> list[int]:
    """Item tokens of the demo model."""
    return [rng.randrange(16, VOCAB_SIZE) for _ in range(count)]
