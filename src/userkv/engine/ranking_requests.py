"""What requests to a ranking model must keep, so that no candidate's KV is ever taken from a cache."""

from functools import lru_cache
from typing import Any

from vllm.config import ModelConfig
from vllm.pooling_params import PoolingParams

from userkv.core.ranking import RankingFormat
from userkv.core.ranking_keys import CONFIG_KEY
from userkv.core.request import UserRequest


def check(
    model_config: ModelConfig,
    token_ids: list[int] | None,
    user: UserRequest | None,
    pooling_params: PoolingParams | None,
) -> None:
    """Check a request; one without a user is kept from reading vLLM's prefix cache, which knows no candidates.

    Args:
        model_config: of the engine.
        token_ids: the prompt.
        user: the request's user part.
        pooling_params: of the request, to be changed; ``None`` if it is only checked.

    Raises:
        InvalidUserRequestError: the history reaches into the candidates, or ends before them.

    """
    section = getattr(model_config.hf_config, CONFIG_KEY, None)
    if not section or section.get("score") == "label" or token_ids is None:
        return
    if user is not None:
        _format(section.get("candidate_offset"), section.get("candidate_marker")).check_history(
            token_ids, user.history_len
        )
    elif pooling_params is not None:
        pooling_params.skip_reading_prefix_cache = True


@lru_cache
def _format(candidate_offset: Any, candidate_marker: Any) -> RankingFormat:
    return RankingFormat(candidate_offset, candidate_marker)
