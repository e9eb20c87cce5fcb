"""Training sequences: which moments of which histories are learned from, and with which candidates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from userkv.ranking.history_window import HistoryWindow
from userkv.train.interactions import UserHistory
from userkv.train.negatives import NegativeSampler
from userkv.train.packed import Packed

SORTED_TOGETHER = 8
"""Batches whose sequences are sorted by length, so that little is padded; the order of batches is random again."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step learns from.

    Attributes:
        packed: the sequences; the first candidate of each moment is what the user did then, the others are drawn.
        labels: float32 ``[batch, moments, candidates, tasks]``: 0 for all that is drawn.
        log_odds: float32 ``[batch, moments, candidates]``: how much more often a candidate is drawn than chosen, as a
            logarithm, if it were chosen every time: what a logit must be moved by (see ``trainer.loss``).
        weights: float32 ``[batch, moments]``: 0 for padding.

    """

    packed: Packed
    labels: torch.Tensor
    log_odds: torch.Tensor
    weights: torch.Tensor


class Batches:
    """The batches of an epoch: every cut of every training history once, with some events drawn from behind it.

    A history longer than the window is cut as it will be when the model serves it, so a model meets in training just
    the lengths and the beginnings that it will meet then. Events with the same cut share the computation of the
    history, which is why an epoch takes several of each cut, and not all.
    """

    def __init__(
        self,
        histories: Sequence[UserHistory],
        window: HistoryWindow,
        sampler: NegativeSampler,
        rng: np.random.Generator,
        *,
        first_token: int,
        batch_size: int,
        moments: int,
        negatives: int,
    ) -> None:
        """Args: first_token: of the catalogue's first item; moments: of each cut; negatives: of each moment."""
        self._histories = histories
        self._sampler = sampler
        self._rng = rng
        self._first_token = first_token
        self._batch_size = batch_size
        self._moments = moments
        self._negatives = negatives
        self._segments = [
            (index, start, places)
            for index, history in enumerate(histories)
            for start, places in _by_cut(np.arange(1, len(history.items)), window)
        ]

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._segments) // self._batch_size)

    def epoch(self) -> Iterator[Batch]:
        """The batches of one epoch, in random order."""
        sequences = [
            (index, start, self._rng.permutation(places)[: self._moments]) for index, start, places in self._segments
        ]
        order = self._rng.permutation(len(sequences))
        batches = []
        for at in range(0, len(order), SORTED_TOGETHER * self._batch_size):
            chunk = [sequences[number] for number in order[at : at + SORTED_TOGETHER * self._batch_size]]
            chunk.sort(key=lambda sequence: int(sequence[2].max()) - sequence[1])
            batches += [chunk[first : first + self._batch_size] for first in range(0, len(chunk), self._batch_size)]
        for number in self._rng.permutation(len(batches)):
            yield self._batch(batches[number])

    def _batch(self, sequences: Sequence[tuple[int, int, npt.NDArray[np.int64]]]) -> Batch:
        size, moments = len(sequences), max(len(places) for _, _, places in sequences)
        length = max(int(places.max()) - start for _, start, places in sequences)
        num_tasks = self._histories[0].labels.shape[1]
        history = np.zeros((size, length), np.int64)
        at = np.zeros((size, moments), np.int64)
        chosen = np.zeros((size, moments), np.int64)
        labels = np.zeros((size, moments, 1 + self._negatives, num_tasks), np.float32)
        weights = np.zeros((size, moments), np.float32)
        for row, (index, start, places) in enumerate(sequences):
            user = self._histories[index]
            seen = user.items[start : int(places.max())]
            history[row, : len(seen)] = seen
            at[row, : len(places)] = places - start
            chosen[row, : len(places)] = user.items[places]
            labels[row, : len(places), 0] = user.labels[places]
            weights[row, : len(places)] = 1
        drawn = self._sampler.draw((size, moments, self._negatives))
        candidates = np.concatenate([chosen[..., None], drawn], axis=-1)
        odds = np.log(self._negatives * self._sampler.probability[candidates])
        first = self._first_token
        packed = Packed(torch.from_numpy(history + first), torch.from_numpy(at), torch.from_numpy(candidates + first))
        return Batch(
            packed, torch.from_numpy(labels), torch.from_numpy(odds.astype(np.float32)), torch.from_numpy(weights)
        )


def _by_cut(places: npt.NDArray[np.int64], window: HistoryWindow) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """The places of a history by where the window cuts what is before them."""
    starts = np.array([window.start(int(place)) for place in places], np.int64)
    for start in np.unique(starts):
        yield int(start), places[starts == start]
