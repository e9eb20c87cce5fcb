"""Negative examples: items that a user did not choose, half of them as often as others choose them."""

import numpy as np
import numpy.typing as npt

POPULAR_PART = 0.5
"""Of the negatives; the others are drawn uniformly, so that items nobody touches get a low score, too."""


class NegativeSampler:
    """Draws items with a known probability, which training corrects the logits by (the "logQ" of each item).

    Not thread-safe: a draw changes the generator.
    """

    def __init__(self, counts: npt.NDArray[np.int64], rng: np.random.Generator) -> None:
        """Args: counts: ``[items]``, how often each is chosen; rng: the only source of randomness."""
        self._num_items = len(counts)
        self._rng = rng
        # A place in the list of all events is an item drawn by popularity.
        self._events = np.repeat(np.arange(len(counts)), counts)
        popular = counts / max(1, counts.sum())
        self.probability: npt.NDArray[np.float64] = POPULAR_PART * popular + (1 - POPULAR_PART) / len(counts)

    def draw(self, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Items, int64 of this shape. They may repeat, and some may be what the user chose: the correction knows."""
        uniform = self._rng.integers(0, self._num_items, shape)
        popular = self._events[self._rng.integers(0, len(self._events), shape)]
        return np.where(self._rng.random(shape) < POPULAR_PART, popular, uniform)
