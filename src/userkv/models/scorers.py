"""From a candidate's hidden states to its scores."""

from collections.abc import Callable

import numpy as np
import torch

ROWS = 64
"""Rows of logits at once: over a large vocabulary they take much memory."""


class HeadScorer:
    """Probabilities of tasks, from heads on a candidate's last token.

    Args:
        heads: from hidden states ``[tokens, width]`` to logits ``[tokens, tasks]``.
        num_tasks: heads.

    """

    def __init__(self, heads: Callable[[torch.Tensor], torch.Tensor], num_tasks: int) -> None:
        self.num_tasks = num_tasks
        self._heads = heads

    def needed(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return ends - 1

    def score(self, hidden: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self._heads(hidden).float())


class LogprobScorer:
    """Log-probability of a candidate's tokens behind its first one, the marker.

    Args:
        logits: from hidden states ``[tokens, width]`` to logits ``[tokens, vocabulary]``.

    """

    num_tasks = 1

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits = logits

    def needed(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        inside = np.ones(ends[-1] - starts[0] if len(starts) else 0, bool)
        if len(starts):
            inside[ends - 1 - starts[0]] = False
        return np.flatnonzero(inside) + (starts[0] if len(starts) else 0)

    def score(self, hidden: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        scores = torch.empty(len(hidden), 1)
        for first in range(0, len(hidden), ROWS):
            logits = self._logits(hidden[first : first + ROWS]).float()
            chosen = logits.gather(1, next_tokens[first : first + ROWS, None]).squeeze(1)
            scores[first : first + ROWS, 0] = (chosen - logits.logsumexp(-1)).cpu()
        return scores
