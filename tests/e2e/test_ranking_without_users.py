"""A ranking model on vLLM without the user cache: vLLM's prefix cache is on, and no score is lost in it."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.ranking_engine import RankAsk, RankingEngine, hstu_scores, start_ranking_engine, write_hstu

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hstu(tmp_path_factory.mktemp("hstu"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RankingEngine]:
    with start_ranking_engine(model, users=False, block_size=32, max_model_len=1024) as engine:
        yield engine


def test_a_repeated_request_has_all_scores(engine: RankingEngine, model: Path) -> None:
    rng = random.Random(1)
    ask = RankAsk([rng.randrange(250**2) for _ in range(100)], [rng.randrange(250**2) for _ in range(80)])
    expected = hstu_scores(model, ask)
    for _ in range(3):
        (ranked,) = engine.rank(ask)
        torch.testing.assert_close(ranked.scores, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("token_ids", [[20, 10**6], [20, 2**70], [20] * 1023 + [2**31], [20, 516 + 20, 17, 18]])
def test_the_engine_outlives_prompts_that_it_cannot_compute(engine: RankingEngine, token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"tokens that are not from 0 to|the model takes 2"):
        engine.llm.encode({"prompt_token_ids": token_ids}, pooling_task="classify", use_tqdm=False)
    (ranked,) = engine.rank(RankAsk([1, 2], [3]))
    assert torch.isfinite(ranked.scores).all()
