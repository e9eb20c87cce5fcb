"""A ranking model on vLLM without the user cache: vLLM's prefix cache is on, and no score is lost in it."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.engine.input_processor import InputProcessor

from tests.support.ranking_engine import RankAsk, RankingEngine, hstu_scores, write_hstu
from userkv.core.ranking_spec import load_spec
from userkv.core.settings import ENABLE
from userkv.engine import ranking_requests

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hstu(tmp_path_factory.mktemp("hstu"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RankingEngine]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(ENABLE, "0")
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)  # To be put back.
        ranking_requests.install()  # As the plugin does it in a process of its own.
        from vllm import LLM

        llm = LLM(
            str(model),
            runner="pooling",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=2**26,
            block_size=32,
            max_model_len=1024,
        )
        try:
            yield RankingEngine(llm, load_spec(model))
        finally:
            llm.llm_engine.engine_core.shutdown()


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
