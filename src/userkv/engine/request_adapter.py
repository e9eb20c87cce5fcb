"""From vLLM's request to the :class:`CacheRequest`, made once per request. Engine process.

The work that grows with the history (copying its tokens into an array) is done where vLLM would hash the prompt's
blocks: in the engine's input thread, before the scheduler sees the request.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from userkv.cache.cache_request import CacheRequest
from userkv.core.errors import InvalidUserRequestError
from userkv.core.request import NO_SCOPE, KVScope, UserKey, UserRequest, foreign_params, read_user
from userkv.core.tokens import as_tokens

BlockHasher = Callable[[Request], list[BlockHash]]
_ATTRIBUTE = "_userkv_cache_request"


def parse_user_request(
    params: Mapping[str, Any] | None,
    prompt_token_ids: list[int] | None,
    *,
    has_embeddings: bool,
    has_media: bool,
    resumable: bool,
) -> UserRequest | None:
    """The user part of a request, refused where KV would depend on more than the prompt's token ids.

    Raises:
        InvalidUserRequestError: the user part is wrong or cannot be combined with the rest of the request.

    """
    request = read_user(params, len(prompt_token_ids or ()))
    if request is None:
        return None
    if has_embeddings or prompt_token_ids is None:
        raise InvalidUserRequestError("user_id needs a prompt of token ids; send prompt embeddings without user_id")
    if has_media:
        raise InvalidUserRequestError("user_id needs a prompt of token ids; send images and audio without user_id")
    if resumable:
        raise InvalidUserRequestError("user_id cannot be used in a streaming-input session; send ordinary requests")
    return request


def user_params(sampling_params: Any, pooling_params: Any) -> Mapping[str, Any] | None:
    """Where ``kv_transfer_params`` are in vLLM's parameters of a completion or pooling request."""
    if sampling_params is not None:
        return (sampling_params.extra_args or {}).get("kv_transfer_params")
    if pooling_params is not None:
        return (pooling_params.extra_kwargs or {}).get("kv_transfer_params")
    return None


def cache_request_of(request: Request) -> CacheRequest | None:
    """The request as the user cache sees it, or ``None`` for an ordinary request.

    Raises:
        InvalidUserRequestError: only on the first call, for a request that no front end has validated.

    """
    attributes = request.__dict__
    if _ATTRIBUTE not in attributes:
        attributes[_ATTRIBUTE] = _make_cache_request(request)
    cache_request: CacheRequest | None = attributes[_ATTRIBUTE]
    return cache_request


def skip_hashing_user_requests(hasher: BlockHasher) -> BlockHasher:
    """A block hasher that gives user requests no hashes.

    So neither their candidates nor their histories enter vLLM's prefix cache or any connector that goes by hashes.
    """

    def hash_blocks(request: Request) -> list[BlockHash]:
        ordinary = cache_request_of(request) is None
        # vLLM calls this again for each token of output: from now on its own hasher, or none.
        request._block_hasher = hasher if ordinary else None
        return hasher(request) if ordinary else []

    return hash_blocks


def _make_cache_request(request: Request) -> CacheRequest | None:
    params = user_params(request.sampling_params, request.pooling_params)
    if params is None:
        return None
    user = parse_user_request(
        params,
        request.prompt_token_ids,
        has_embeddings=request.prompt_embeds is not None,
        has_media=bool(request.mm_features),
        resumable=getattr(request, "resumable", False),
    )
    if user is None or request.prompt_token_ids is None:
        return None
    # Connectors see only their own parameters; without a connector vLLM warns about parameters that no part reads.
    request.kv_transfer_params = foreign_params(params)
    lora = request.lora_request
    name, path, number = (lora.lora_name, lora.lora_path, lora.lora_int_id) if lora is not None else ("", "", 0)
    scope = KVScope(name, path, request.cache_salt or "", number)
    key = UserKey(user.user_id, scope if scope != NO_SCOPE else NO_SCOPE)
    return CacheRequest(key, user, as_tokens(request.prompt_token_ids[: user.history_len]))
