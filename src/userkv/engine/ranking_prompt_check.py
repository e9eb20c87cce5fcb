"""What prompts of a ranking model must be like, on whichever way they come; ``/v1/rank`` makes no other ones.

A worker cannot refuse a prompt: it would stop. So the front end does.
"""

import functools
from typing import Any

import numpy as np
from vllm.config import ModelConfig
from vllm.pooling_params import PoolingParams

from userkv.core.errors import InvalidUserRequestError
from userkv.core.request import UserRequest
from userkv.ranking.config_keys import CONFIG_KEY
from userkv.ranking.prompt import MAX_ITEM_TOKENS, RankingFormat


def check_ranking_prompt(model_config: ModelConfig, token_ids: list[int] | None, user: UserRequest | None) -> None:
    """Check a prompt, in time that grows with its length. Prompts of other models pass.

    Args:
        model_config: of the engine.
        token_ids: the prompt; ``None`` if it is not made of tokens.
        user: the request's user part.

    Raises:
        InvalidUserRequestError: the history is not what comes before the candidates, or something is too long.

    """
    section = _section(model_config)
    if section is None or token_ids is None:
        return
    config = model_config.hf_config
    vocabulary = model_config.get_vocab_size()
    # vLLM checks this with the tokenizer, if there is one. (Python's numbers: they need not fit into numpy's.)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        raise InvalidUserRequestError(f"the prompt has tokens that are not from 0 to {vocabulary - 1}")
    _format(section.get("candidate_offset"), section.get("candidate_marker")).check(
        np.asarray(token_ids, np.int64),
        user.history_len if user is not None else None,
        section.get("max_history_tokens") or getattr(config, "max_sequence_length", None),
        section.get("max_item_tokens") or getattr(config, "max_item_tokens", None) or MAX_ITEM_TOKENS,
    )


def bypass_prefix_cache(model_config: ModelConfig, pooling_params: PoolingParams | None) -> None:
    """Keep a ranking request without a user from reading vLLM's prefix cache, which knows no candidates."""
    if pooling_params is not None and _section(model_config) is not None:
        pooling_params.skip_reading_prefix_cache = True


def _section(model_config: ModelConfig) -> dict[str, Any] | None:
    """The configuration of a ranking model with candidates of its own; ``None`` for other models."""
    section = getattr(model_config.hf_config, CONFIG_KEY, None)
    return section if section and section.get("score") != "label" else None


@functools.cache
def _format(candidate_offset: Any, candidate_marker: Any) -> RankingFormat:
    return RankingFormat(candidate_offset, candidate_marker)
