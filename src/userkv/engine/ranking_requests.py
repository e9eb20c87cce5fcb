"""What prompts of a ranking model must be like, whichever way they come; ``/v1/rank`` makes no other ones."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.config import ModelConfig
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.input_processor import InputProcessor

from userkv.core.errors import InvalidUserRequestError
from userkv.core.request import UserRequest
from userkv.ranking.config_keys import CONFIG_KEY
from userkv.ranking.prompt import MAX_ITEM_TOKENS, RankingFormat


def check(
    model_config: ModelConfig,
    token_ids: list[int] | None,
    user: UserRequest | None,
    pooling_params: PoolingParams | None,
) -> None:
    """Check a request before it reaches a worker, which could only die of what it cannot compute.

    One without a user is kept from reading vLLM's prefix cache, which knows no candidates.

    Args:
        model_config: of the engine.
        token_ids: the prompt.
        user: the request's user part.
        pooling_params: of the request, to be changed; ``None`` if it is only checked.

    Raises:
        InvalidUserRequestError: the history is not what comes before the candidates, or something is too long.

    """
    config = model_config.hf_config
    section = getattr(config, CONFIG_KEY, None)
    if not section or section.get("score") == "label" or token_ids is None:
        return
    vocabulary = model_config.get_vocab_size()
    # vLLM asks the tokenizer, if there is one. (Python's numbers: they need not fit into numpy's.)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        raise InvalidUserRequestError(f"the prompt has tokens that are not from 0 to {vocabulary - 1}")
    _format(section.get("candidate_offset"), section.get("candidate_marker")).check(
        np.asarray(token_ids, np.int64),
        user.history_len if user is not None else None,
        section.get("max_history_tokens") or getattr(config, "max_sequence_length", None),
        section.get("max_item_tokens") or getattr(config, "max_item_tokens", None) or MAX_ITEM_TOKENS,
    )
    if user is None and pooling_params is not None:
        pooling_params.skip_reading_prefix_cache = True


def install() -> None:
    """Check prompts of ranking models in an engine without the user cache, too."""
    process_inputs: Callable[..., Any] = InputProcessor.process_inputs

    @functools.wraps(process_inputs)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        check(self.model_config, request.prompt_token_ids, None, request.pooling_params)
        return request

    InputProcessor.process_inputs = checked


@functools.cache
def _format(candidate_offset: Any, candidate_marker: Any) -> RankingFormat:
    return RankingFormat(candidate_offset, candidate_marker)
