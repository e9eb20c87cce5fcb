"""Real engines with ranking models, and the scores that they must return, from models without any cache."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.patching import put_only_models_into_vllm, put_users_into_vllm
from userkv.models.hstu.config import HSTUConfig
from userkv.models.hstu.reference import HSTUModel, isolation_mask
from userkv.ranking.spec import RankingSpec, load_spec

NUM_ITEMS = 516
"""Items' tokens of the HSTU model here, 16 of them reserved."""


@dataclass(frozen=True)
class RankAsk:
    """One ranking request: items as the model's spec takes them."""

    history: list[int]
    candidates: list[int]
    user: str | None = None
    stage: str = "rank"


@dataclass(frozen=True)
class Ranked:
    """What came back: float32 ``[candidates, tasks]``, cached tokens, and those by tier."""

    scores: torch.Tensor
    cached: int
    tiers: dict[str, int]


class RankingEngine:
    """A real vLLM engine in processes of its own."""

    def __init__(self, llm: Any, spec: RankingSpec) -> None:
        self.llm = llm
        self.spec = spec

    def rank(self, *asks: RankAsk) -> list[Ranked]:
        """Submit requests all at once and wait for all."""
        from vllm import PoolingParams

        prompts = [self.spec.prompt(ask.history, ask.candidates) for ask in asks]
        params = [
            PoolingParams(
                task="classify",
                extra_kwargs={
                    "kv_transfer_params": {
                        "user_id": ask.user,
                        "history_len": prompt.history_len,
                        "stage": ask.stage,
                    }
                }
                if ask.user is not None
                else None,
            )
            for ask, prompt in zip(asks, prompts, strict=True)
        ]
        outputs = self.llm.encode(
            [{"prompt_token_ids": prompt.token_ids} for prompt in prompts],
            pooling_params=params,
            pooling_task="classify",
            use_tqdm=False,
        )
        return [
            Ranked(output.outputs.data, output.num_cached_tokens, getattr(output, "userkv_tiers", {}))
            for output in outputs
        ]


@contextmanager
def start_ranking_engine(model: Path, *, users: bool = True, **options: Any) -> Iterator[RankingEngine]:
    """An engine in float32, with the user cache or without; ``options`` are those of vLLM's ``LLM``."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if users:
            put_users_into_vllm(monkeypatch)
        else:
            put_only_models_into_vllm(monkeypatch)
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        llm = LLM(
            str(model),
            runner="pooling",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_cache_memory_bytes=2**26,
            **options,
        )
        try:
            yield RankingEngine(llm, load_spec(model))
        finally:
            llm.llm_engine.engine_core.shutdown()


def write_hstu(directory: Path, **changes: Any) -> Path:
    """An untrained HSTU ranker whose scores depend visibly on every token of the history."""
    options = {
        "num_items": NUM_ITEMS,
        "num_blocks": 3,
        "max_sequence_length": 1024,
        "tasks": ["click", "like"],
        "task_weights": [1.0, 0.5],
        "max_item_tokens": 2,
        **changes,
    }
    config = HSTUConfig(
        **options,
        userkv_ranking={
            "candidate_offset": options["num_items"],
            "items": {"kind": "codec", "base": (NUM_ITEMS - 16) // 2, "digits": 2, "reserved": 16},
        },
        dtype="float32",
    )
    torch.manual_seed(1)
    model = HSTUModel(config)
    for name, parameter in model.named_parameters():
        scale = 30.0 if "uvqk" in name else 1.0
        torch.nn.init.normal_(parameter, std=scale * parameter.shape[-1] ** -0.5)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    return directory


@functools.cache
def reference_hstu(directory: Path) -> HSTUModel:
    """The model of a directory in plain PyTorch."""
    from safetensors.torch import load_file

    model = HSTUModel(HSTUConfig.from_pretrained(directory))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.eval()


@torch.inference_mode()
def hstu_scores(directory: Path, ask: RankAsk) -> torch.Tensor:
    """Scores of a request by the plain model, ``[candidates, tasks]``."""
    model, spec = reference_hstu(directory), load_spec(directory)
    prompt = spec.prompt(ask.history, ask.candidates)
    assert spec.format is not None
    positions = torch.from_numpy(spec.format.positions(prompt.token_ids))
    tokens = torch.tensor([prompt.token_ids])
    hidden = model(tokens, positions[:1], isolation_mask(positions)[None])[0]
    starts = [*spec.format.starts(prompt.token_ids)[1:], len(prompt.token_ids)]
    ends = torch.tensor(starts[-len(ask.candidates) :]) - 1 if ask.candidates else torch.tensor([], dtype=torch.long)
    return torch.sigmoid(model.logits(hidden[ends]))


@functools.cache
def reference_qwen3(directory: Path) -> Any:
    """The decoder of a directory in transformers."""
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def qwen3_scores(directory: Path, ask: RankAsk) -> torch.Tensor:
    """Scores of a request, ``[candidates, 1]``, each candidate in a row of its own behind the history."""
    model, spec = reference_qwen3(directory), load_spec(directory)
    prompts = [spec.prompt(ask.history, [candidate]) for candidate in ask.candidates]
    if not prompts:
        return torch.empty(0, 1)
    length = prompts[0].history_len
    # The history is the same in all rows, so it is computed once.
    past = model(torch.tensor([prompts[0].token_ids[:length]]), use_cache=True).past_key_values if length else None
    if past is not None:
        past.batch_repeat_interleave(len(prompts))
    tokens = torch.tensor([prompt.token_ids[length:] for prompt in prompts])
    logprobs = model(tokens, past_key_values=past).logits.log_softmax(-1)
    return logprobs[:, :-1].gather(2, tokens[:, 1:, None]).sum(1)


@torch.inference_mode()
def qwen3_score_of_one(directory: Path, history: list[int], candidate: int) -> float:
    """The score of one candidate in one run over the whole prompt."""
    prompt = load_spec(directory).prompt(history, [candidate])
    logprobs = reference_qwen3(directory)(torch.tensor([prompt.token_ids])).logits[0].log_softmax(-1)
    at = prompt.history_len
    return float(sum(logprobs[at + i, token] for i, token in enumerate(prompt.token_ids[at + 1 :])))
