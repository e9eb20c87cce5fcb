"""Training sequences: some events of every cut, with what a server would show the model."""

import numpy as np
import pytest
import torch

from userkv.ranking.history_window import HistoryWindow
from userkv.train.batches import Batches
from userkv.train.interactions import UserHistory
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


Event = tuple[list[int], int, list[float]]
"""What is seen, what was chosen then, and its labels."""


def events(made: Batches) -> list[Event]:
    """What an epoch learns from."""
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
    return found


def test_an_epoch_has_some_events_of_every_cut_behind_what_the_window_leaves() -> None:
    cuts: dict[tuple[str, int], list[Event]] = {}
    for user in histories():
        for place in range(1, len(user.items)):
            start = WINDOW.start(place)
            event = (user.items[start:place].tolist(), int(user.items[place]), user.labels[place].tolist())
            cuts.setdefault((user.user, start), []).append(event)
    assert len(cuts) == 1 + 1 + 1 + 8
    made = batches()
    epochs = [events(made) for _ in range(30)]
    for epoch in epochs:
        for own in cuts.values():
            assert sum(event in own for event in epoch) == min(4, len(own))
            assert all(epoch.count(event) <= 1 for event in own)
    everything = [event for epoch in epochs for event in epoch]
    assert all(event in everything for own in cuts.values() for event in own)


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
