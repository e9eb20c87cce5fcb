"""From vLLM's request to the user look-up."""

from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from userkv.core.errors import InvalidUserRequestError
from userkv.core.request import UserKey
from userkv.engine.request_adapter import cache_request_of, skip_hashing_user_requests

USER = {"user_id": "u", "history_len": 2}


def request(params: Any = None, pooling: bool = False, **fields: Any) -> Request:
    hasher = skip_hashing_user_requests(lambda request: [b"hash"])
    sampling = pooled = None
    if pooling:
        pooled = PoolingParams(extra_kwargs={"kv_transfer_params": params} if params else None)
    else:
        sampling = SamplingParams(extra_args={"kv_transfer_params": params} if params else None)
    return Request("r", fields.pop("prompt", [5, 6, 7]), sampling, pooled, block_hasher=hasher, **fields)


@pytest.mark.parametrize("pooling", [False, True])
def test_a_user_request(pooling: bool) -> None:
    lookup = cache_request_of(request(USER, pooling))
    assert lookup is not None
    assert lookup.key == UserKey("u")
    assert lookup.history.tolist() == [5, 6]


@pytest.mark.parametrize("pooling", [False, True])
def test_an_ordinary_request(pooling: bool) -> None:
    ordinary = request(None, pooling)
    assert cache_request_of(ordinary) is None
    assert ordinary.block_hashes == [b"hash"]


def test_user_requests_have_no_hashes_and_keep_only_other_connectors_parameters() -> None:
    mine = request({**USER, "remote_host": "h"})
    assert mine.block_hashes == []
    assert mine.kv_transfer_params == {"remote_host": "h"}
    assert request(USER).kv_transfer_params is None
    mine.append_output_token_ids([1, 2])
    assert mine.block_hashes == []


def test_vllm_hashes_an_ordinary_request_itself_from_the_first_call_on() -> None:
    asked: list[Request] = []
    hasher = skip_hashing_user_requests(lambda request: asked.append(request) or [b"hash"])  # type: ignore[func-returns-value]
    ordinary = Request("r", [5, 6, 7], SamplingParams(), None, block_hasher=hasher)
    ordinary.append_output_token_ids(1)
    assert ordinary.block_hashes == [b"hash"] * 2
    assert asked == [ordinary] * 2
    assert ordinary._block_hasher is not hasher


def test_kv_of_other_adapters_and_tenants_is_kept_apart() -> None:
    adapter = LoRARequest("adapter", 1, "/nowhere")
    retrained = LoRARequest("adapter", 2, "/elsewhere")
    keys = [
        cache_request_of(one).key  # type: ignore[union-attr]
        for one in (
            request(USER),
            request(USER, lora_request=adapter),
            request(USER, lora_request=retrained),
            request(USER, cache_salt="tenant"),
            request(USER, lora_request=adapter, cache_salt="tenant"),
        )
    ]
    assert len(set(keys)) == 5
    assert {key.user_id for key in keys} == {"u"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": None, "prompt_embeds": torch.zeros(3, 4)}, "token ids; send prompt embeddings"),
        ({"prompt_embeds": torch.zeros(3, 4), "prompt_is_token_ids": [True, True, False]}, "send prompt embeddings"),
        ({"mm_features": [object()]}, "send images and audio without user_id"),
    ],
)
def test_what_depends_on_more_than_tokens_is_refused(fields: dict[str, Any], says: str) -> None:
    params = {"user_id": "u"}
    with pytest.raises(InvalidUserRequestError, match=says):
        request(params, **fields)
