"""Admission: the front end reads and checks each request once, before the request costs any compute.

A streamed HTTP response begins with status 200, so a bad request has to be refused before vLLM's generator starts.
``AsyncLLM.generate`` and ``encode`` are therefore the first place that sees a request, :func:`admit_early`. All other
ways lead to ``InputProcessor.process_inputs``, :func:`admit`, which does not repeat what the first place has done.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.config import ModelConfig
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from userkv.core.request import ReadParams, UserRequest
from userkv.engine.ranking_prompt_check import bypass_prefix_cache, check_ranking_prompt
from userkv.engine.request_adapter import parse_user_request, user_params

_PARAMS = "kv_transfer_params"


class AdmittedPrompt(dict[str, Any]):
    """A rendered prompt that has passed the checks, on its way from ``AsyncLLM`` to ``process_inputs``.

    Attributes:
        user: the request's user part.

    """

    __slots__ = ("user",)

    def __init__(self, prompt: dict[str, Any], user: UserRequest | None) -> None:
        super().__init__(prompt)
        self.user = user


def admit_early(model_config: ModelConfig, prompt: Any, sampling_params: Any, pooling_params: Any) -> Any:
    """Check a request of ``AsyncLLM``.

    Args:
        model_config: of the engine.
        prompt: what ``AsyncLLM`` was called with.
        sampling_params: of a completion, or ``None``.
        pooling_params: of a pooling request, or ``None``.

    Returns:
        The prompt to go on with. One that is not rendered yet is returned as it is; ``process_inputs`` checks it.

    Raises:
        InvalidUserRequestError: the request must not run.

    """
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) and "type" in prompt else None
    if token_ids is None:
        return prompt
    user = parse_user_request(
        user_params(sampling_params, pooling_params),
        token_ids,
        has_embeddings=prompt.get("prompt_embeds") is not None,
        has_media=prompt["type"] == "multimodal",
        resumable=False,
    )
    check_ranking_prompt(model_config, token_ids, user)
    return AdmittedPrompt(prompt, user)


def admit(model_config: ModelConfig, prompt: Any, request: EngineCoreRequest) -> None:
    """Check a request that goes to the engine, unless :func:`admit_early` has, and note what is known of it.

    Args:
        model_config: of the engine.
        prompt: what ``process_inputs`` was called with.
        request: what it made of it; its parameters are a copy that belongs to the request.

    Raises:
        InvalidUserRequestError: the request must not run.

    """
    params = user_params(request.sampling_params, request.pooling_params)
    if isinstance(prompt, AdmittedPrompt) and request.prompt_token_ids is prompt["prompt_token_ids"]:
        user = prompt.user
    else:
        user = parse_user_request(
            params,
            request.prompt_token_ids,
            has_embeddings=request.prompt_embeds is not None,
            has_media=bool(request.mm_features),
            resumable=request.resumable,
        )
        check_ranking_prompt(model_config, request.prompt_token_ids, user)
    if user is None:
        bypass_prefix_cache(model_config, request.pooling_params)
    elif params is not None:
        _carry(request, ReadParams(params, user, len(request.prompt_token_ids or ())))


def install_for_ranking_models() -> None:
    """Check ranking models' prompts in an engine without the user cache, too."""
    process_inputs: Callable[..., Any] = InputProcessor.process_inputs

    @functools.wraps(process_inputs)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        check_ranking_prompt(self.model_config, request.prompt_token_ids, None)
        bypass_prefix_cache(self.model_config, request.pooling_params)
        return request

    InputProcessor.process_inputs = checked


def _carry(request: EngineCoreRequest, params: ReadParams) -> None:
    """Have an engine in the same process find the user part that was read. Another process reads it once more."""
    if request.sampling_params is not None:
        # A copy: other requests may share the mapping.
        request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), _PARAMS: params}
    elif request.pooling_params is not None:
        request.pooling_params.extra_kwargs = {**(request.pooling_params.extra_kwargs or {}), _PARAMS: params}
