"""A decoder with learned heads: per task a probability from the last token of each candidate."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.ranking_engine import RankAsk, start_ranking_engine
from userkv.ranking.spec import load_spec
from userkv.serving.demo_model import ensure_demo_ranker

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo ranker with heads for two tasks, as a sequence classification checkpoint has them."""
    directory = tmp_path_factory.mktemp("head") / "model"
    shutil.copytree(ensure_demo_ranker(), directory)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    config["userkv_ranking"] |= {"score": "head", "tasks": ["click", "like"], "task_weights": [1.0, 0.5]}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    heads = torch.randn(2, config["hidden_size"], generator=torch.Generator().manual_seed(0)) * 0.05
    save_file(weights | {"score.weight": heads}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@torch.inference_mode()
def expected(directory: Path, ask: RankAsk) -> torch.Tensor:
    """One run per candidate in transformers."""
    from transformers import Qwen3Model

    model = Qwen3Model.from_pretrained(directory, dtype=torch.float32).eval()
    heads = load_file(directory / "model.safetensors")["score.weight"]
    spec = load_spec(directory)
    prompts = [spec.prompt(ask.history, [candidate]).token_ids for candidate in ask.candidates]
    return torch.stack(
        [torch.sigmoid(model(torch.tensor([ids])).last_hidden_state[0, -1] @ heads.T) for ids in prompts]
    )


def test_heads_of_a_decoder(model: Path) -> None:
    rng = random.Random(1)
    history = [rng.randrange(2168**2) for _ in range(60)]
    with start_ranking_engine(model, block_size=32, max_model_len=1024, max_num_batched_tokens=64) as engine:
        for cached in (0, 120):
            ask = RankAsk(history, [rng.randrange(2168**2) for _ in range(20)], "u")
            (ranked,) = engine.rank(ask)
            assert ranked.cached == cached
            assert ranked.scores.std(0).min() > 0.01
            torch.testing.assert_close(ranked.scores, expected(model, ask), atol=1e-4, rtol=0)
