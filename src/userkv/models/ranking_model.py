"""What all ranking models share: positions that tell candidates apart, and a pooler that returns their scores."""

from collections.abc import Set
from typing import Any, Protocol

import numpy as np
import torch
from vllm.model_executor.layers.pooler import Pooler, PoolingParamsUpdate
from vllm.tasks import PoolingTask
from vllm.v1.outputs import PoolerOutput
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from userkv.ranking.prompt import RankingFormat

TASK = "classify"
"""The pooling task of ranking: vLLM's prefix cache stays on with it, unlike with those that return a row per token."""


class Scorer(Protocol):
    """From hidden states to scores."""

    num_tasks: int

    def needed(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Which tokens of candidates are scored, given where candidates begin and end: one or more of each."""

    def score(self, hidden: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """Scores of tokens; a candidate's score is the sum over its own.

        Args:
            hidden: ``[tokens, width]``.
            next_tokens: int64 ``[tokens]``, the token behind each; of no meaning behind a candidate's last one.

        Returns:
            float32 ``[tokens, tasks]``.

        """


class RankingModel:
    """Mixed into a vLLM model: carries the numbers of :meth:`RankingFormat.positions` to its ``forward``."""

    supports_mrope = True
    is_pooling_model = True
    ranking_format: RankingFormat

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """What vLLM calls M-RoPE: three numbers per token, cut and put together as the step needs them."""
        return torch.from_numpy(self.ranking_format.positions(input_tokens)), 0


class RankingPooler(Pooler):
    """One row of scores per candidate, collected over the steps of a request.

    A candidate whose tokens were not all computed for this request has a row of NaN: somebody has taken its KV from a
    cache, which must not happen, and no number is better than a wrong one.

    Args:
        ranking_format: where candidates begin.
        scorer: from hidden states to scores.

    """

    def __init__(self, ranking_format: RankingFormat, scorer: Scorer) -> None:
        super().__init__()
        self._format = ranking_format
        self._scorer = scorer

    def get_supported_tasks(self) -> Set[PoolingTask]:
        return {TASK}

    def get_pooling_updates(self, task: PoolingTask) -> PoolingParamsUpdate:
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        cursor = pooling_metadata.get_pooling_cursor()
        ends = cursor.seq_lens_cpu.tolist()
        steps = cursor.num_scheduled_tokens_cpu.tolist()
        outputs: list[torch.Tensor | None] = []
        first = 0
        for tokens, state, end, rows, finished in zip(
            pooling_metadata.get_prompt_token_ids_cpu(),
            pooling_metadata.pooling_states,
            ends,
            steps,
            cursor.get_finished_mask(),
            strict=True,
        ):
            collected = self._collected(tokens, state)
            collected.add(hidden_states[first : first + rows], end - rows, self._scorer)
            outputs.append(collected.result() if finished else None)
            if finished:
                state.clean()
            first += rows
        return outputs

    def _collected(self, tokens: torch.Tensor, state: PoolingStates) -> "_Scores":
        # vLLM keeps this list with the request, for tensors of its own poolers.
        if not state.hidden_states_cache:
            state.hidden_states_cache.append(_Scores(tokens.numpy(), self._format, self._scorer))
        scores: _Scores = state.hidden_states_cache[0]
        return scores


class _Scores:
    """Scores of a request's candidates, as far as they were computed. What is computed twice is written twice."""

    def __init__(self, tokens: np.ndarray, ranking_format: RankingFormat, scorer: Scorer) -> None:
        starts = ranking_format.starts(tokens)
        self._needed = scorer.needed(starts, np.append(starts[1:], len(tokens)))
        self._next_tokens = torch.from_numpy(np.append(tokens[1:], 0))
        self._of = np.searchsorted(starts, self._needed, side="right") - 1
        self._num_candidates = len(starts)
        self._values = torch.full((len(self._needed), scorer.num_tasks), torch.nan)

    def add(self, hidden: torch.Tensor, computed: int, scorer: Scorer) -> None:
        """Score what a step has computed: the tokens from number ``computed`` on."""
        first, last = np.searchsorted(self._needed, (computed, computed + len(hidden)))
        if first < last:
            at = torch.from_numpy(self._needed[first:last])
            rows = hidden[(at - computed).to(hidden.device)]
            self._values[first:last] = scorer.score(rows, self._next_tokens[at].to(hidden.device)).cpu()

    def result(self) -> torch.Tensor:
        """float32 ``[candidates, tasks]``."""
        result = torch.zeros(self._num_candidates, self._values.shape[1])
        return result.index_add_(0, torch.from_numpy(self._of), self._values)
