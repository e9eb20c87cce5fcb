"""A trained model as a scorer of :mod:`evaluate`: the served score, computed without vLLM and without a cache."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from userkv.models.hstu.reference import HSTUModel
from userkv.train.packed import Packed, packed_logits

AT_ONCE = 4096
"""Candidates of one pass, which bounds its memory."""


class ModelScorer:
    """Scores item ids with a model: the sum of its tasks' probabilities with their weights.

    Puts the model into evaluation mode. Not thread-safe beyond what the model is.
    """

    def __init__(self, model: HSTUModel, catalogue: npt.NDArray[np.int64], first_token: int) -> None:
        """Args: catalogue: ascending item ids; first_token: of its first item."""
        self._model = model.eval()
        self._catalogue = catalogue
        self._first_token = first_token
        self._weights = torch.tensor(model.config.task_weights)

    def __call__(self, history: Sequence[int], candidates: Sequence[int]) -> npt.NDArray[np.float32]:
        """The candidates' scores; see :data:`userkv.train.evaluate.Scorer`. All ids must be in the catalogue."""
        seen = self._tokens(history).unsqueeze(0)
        scores = []
        with torch.inference_mode():
            for part in self._tokens(candidates).split(AT_ONCE):
                packed = Packed(seen, torch.tensor([[len(history)]]), part.view(1, 1, -1))
                scores.append(torch.sigmoid(packed_logits(self._model, packed)[0, 0]) @ self._weights)
        found: npt.NDArray[np.float32] = torch.cat(scores).numpy()
        return found

    def _tokens(self, items: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.searchsorted(self._catalogue, np.asarray(items, np.int64)) + self._first_token)
