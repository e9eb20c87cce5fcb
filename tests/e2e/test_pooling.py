"""Pooling requests name users too: the embedding is the same with and without the cache."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.engine import random_tokens, start_engine

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    options = {"runner": "pooling", "convert": "embed", "max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    with start_engine(block_size=32, max_model_len=1024, **options) as engine:
        yield engine.llm


def test_embeddings_from_the_cache_equal_computed_ones(llm: Any) -> None:
    from vllm import PoolingParams

    rng = random.Random(3)
    history = random_tokens(rng, 500)
    for expected_hit in (0, 500, 500):
        prompt = {"prompt_token_ids": [*history, *random_tokens(rng, 20)]}
        user = {"kv_transfer_params": {"user_id": "u", "history_len": 500}}
        (cached,) = llm.embed(prompt, pooling_params=PoolingParams(extra_kwargs=user), use_tqdm=False)
        (computed,) = llm.embed(prompt, pooling_params=PoolingParams(skip_reading_prefix_cache=True), use_tqdm=False)
        assert cached.num_cached_tokens == expected_hit
        difference = torch.tensor(cached.outputs.embedding) - torch.tensor(computed.outputs.embedding)
        assert difference.abs().max() < 1e-4


def test_bad_parameters_raise(llm: Any) -> None:
    from vllm import PoolingParams

    with pytest.raises(ValueError, match="history_len must be between 0 and the prompt's 3 tokens"):
        llm.embed(
            {"prompt_token_ids": [5, 6, 7]},
            pooling_params=PoolingParams(extra_kwargs={"kv_transfer_params": {"user_id": "u", "history_len": 9}}),
            use_tqdm=False,
        )
