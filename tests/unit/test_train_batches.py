"""Training sequences: every event once an epoch, with what a server would show the model."""

import numpy as np
import pytest
import torch

from userkv.core.history_window import HistoryWindow
from userkv.train.batches import Batches
from userkv.train.logs import UserHistory
from userkv.train.negatives import NegativeSampler

NUM_ITEMS = 200
FIRST_TOKEN = 16
WINDOW = HistoryWindow(8, 3)
LENGTHS = (2, 5, 9, 30, 1)


def histories() -> list[UserHistory]:
    rng = np.random.default_rng(1)
    return [
        UserHistory(
            str(length), rng.permutation(NUM_ITEMS)[:length], rng.integers(0, 2, (length, 2)).astype(np.float32)
        )
        for length in LENGTHS
    ]


def batches(seed: int = 0) -> Batches:
    rng = np.random.default_rng(seed)
    sampler = NegativeSampler(np.arange(NUM_ITEMS), rng)
    return Batches(histories(), WINDOW, sampler, rng, first_token=FIRST_TOKEN, batch_size=3, moments=4, negatives=5)


def test_an_epoch_has_every_event_once_behind_what_the_window_leaves() -> None:
    expected = [
        (user.items[WINDOW.start(place) : place].tolist(), int(user.items[place]), user.labels[place].tolist())
        for user in histories()
        for place in range(1, len(user.items))
    ]
    made = batches()
    found = []
    count = 0
    for batch in made.epoch():
        count += 1
        assert batch.packed.candidates.shape[2] == 6
        assert (batch.labels[:, :, 1:] == 0).all()
        assert batch.packed.history.shape[1] <= WINDOW.max_items
        for row, moment in batch.weights.nonzero().tolist():
            seen = batch.packed.history[row, : batch.packed.moments[row, moment]] - FIRST_TOKEN
            chosen = int(batch.packed.candidates[row, moment, 0]) - FIRST_TOKEN
            found.append((seen.tolist(), chosen, batch.labels[row, moment, 0].tolist()))
    assert count == len(made)
    assert sorted(found) == sorted(expected)


def test_log_odds_are_those_of_the_draw() -> None:
    probability = 0.5 * np.arange(NUM_ITEMS) / np.arange(NUM_ITEMS).sum() + 0.5 / NUM_ITEMS
    batch = next(batches().epoch())
    expected = np.log(5 * probability[batch.packed.candidates.numpy() - FIRST_TOKEN])
    torch.testing.assert_close(batch.log_odds, torch.from_numpy(expected).float())


def test_equal_seeds_give_equal_batches() -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [batch.packed.candidates.flatten().tolist() for batch in batches(seed).epoch()]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    one = batches()
    first, second = ([batch.packed.candidates.flatten().tolist() for batch in one.epoch()] for _ in range(2))
    assert first != second


def test_items_are_drawn_as_often_as_the_sampler_says() -> None:
    counts = np.array([0, 1, 4, 15])
    sampler = NegativeSampler(counts, np.random.default_rng(0))
    assert sampler.probability.tolist() == pytest.approx([0.125, 0.15, 0.225, 0.5])
    drawn = np.bincount(sampler.draw((100, 400)).ravel(), minlength=4) / 40_000
    assert drawn == pytest.approx(sampler.probability, abs=0.01)  # Four standard deviations.
