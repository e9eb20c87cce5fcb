"""The HSTU reference: candidates are isolated, and the sequences of training give the served scores."""

from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from userkv.models.hstu.config import HSTUConfig
from userkv.models.hstu.reference import HSTUModel, isolation_mask
from userkv.ranking.prompt import RankingFormat
from userkv.train.packed import Packed, packed_logits
from userkv.train.threads import one_thread

NUM_ITEMS = 30
LONGEST = 12
FORMAT = RankingFormat(candidate_offset=NUM_ITEMS)
EXACT = 1e-12
"""Between sums of the same float64 numbers in another order."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@lru_cache
def model(bias: bool = True) -> HSTUModel:
    """With weights so large that every token seen changes the result visibly."""
    torch.manual_seed(0)
    config = HSTUConfig(
        num_items=NUM_ITEMS,
        item_embedding_dim=8,
        num_blocks=2,
        num_heads=2,
        dqk=4,
        dv=4,
        max_sequence_length=LONGEST,
        max_item_tokens=2,
        enable_relative_attention_bias=bias,
        tasks=("click", "like"),
    )
    made = HSTUModel(config).double().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def scores(history: list[int], candidates: list[list[int]], bias: bool = True) -> torch.Tensor:
    """Logits of the candidates' last tokens, ``[candidates, tasks]``."""
    ids = history + [token for item in candidates for token in FORMAT.candidate(item)]
    positions = torch.from_numpy(FORMAT.positions(ids))
    with torch.no_grad():
        hidden = model(bias)(torch.tensor([ids]), positions[:1], isolation_mask(positions).unsqueeze(0))
    ends = torch.tensor([len(item) for item in candidates]).cumsum(0) + len(history) - 1
    return model(bias).logits(hidden[0, ends])


HISTORY = st.lists(st.integers(0, NUM_ITEMS - 1), max_size=LONGEST)
CANDIDATES = st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=2), min_size=1, max_size=5)


@settings(deadline=None, max_examples=50)
@given(HISTORY, CANDIDATES, st.booleans())
def test_a_candidate_scores_as_it_does_alone(history: list[int], candidates: list[list[int]], bias: bool) -> None:
    together = scores(history, candidates, bias)
    alone = torch.cat([scores(history, [item], bias) for item in candidates])
    torch.testing.assert_close(together, alone, rtol=0, atol=EXACT)


@settings(deadline=None, max_examples=50)
@given(HISTORY, CANDIDATES, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(history: list[int], candidates: list[list[int]], rng: object) -> None:
    order = list(range(len(candidates)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    shuffled = scores(history, [candidates[number] for number in order])
    torch.testing.assert_close(shuffled, scores(history, candidates)[order], rtol=0, atol=EXACT)


def test_every_token_of_the_history_counts_and_so_does_its_place() -> None:
    history = [1, 2, 3, 4]
    base = scores(history, [[9]])
    changed = [[*history[:place], 20, *history[place + 1 :]] for place in range(4)]
    for other in (*changed, [1, 3, 2, 4], history[1:], history[:-1]):
        assert (scores(other, [[9]]) - base).abs().max() > 1e-6
    assert (scores(history, [[9, 5]]) - scores(history, [[8, 5]])).abs().max() > 1e-6


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=LONGEST),
    st.lists(st.tuples(st.integers(0, LONGEST), st.integers(0, NUM_ITEMS - 1)), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_training_sequence_gives_the_served_scores(
    history: list[int], asked: list[tuple[int, int]], bias: bool
) -> None:
    moments = [min(moment, len(history)) for moment, _ in asked]
    candidates = [[item, (item + 1) % NUM_ITEMS] for _, item in asked]
    packed = Packed(torch.tensor([history]), torch.tensor([moments]), torch.tensor([candidates]))
    with torch.no_grad():
        trained = packed_logits(model(bias), packed)[0]
    for number, moment in enumerate(moments):
        served = scores(history[:moment], [[item] for item in candidates[number]], bias)
        torch.testing.assert_close(trained[number], served, rtol=0, atol=EXACT)


def test_sequences_of_one_batch_do_not_meet() -> None:
    rows = [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]  # The second is padded.
    moments, candidates = torch.tensor([[5, 2], [2, 1]]), torch.tensor([[[8, 9], [9, 9]], [[8, 7], [1, 2]]])
    with torch.no_grad():
        both = packed_logits(model(), Packed(torch.tensor(rows), moments, candidates))
    for row, length in ((0, 5), (1, 2)):
        alone = Packed(torch.tensor([rows[row][:length]]), moments[row : row + 1], candidates[row : row + 1])
        with torch.no_grad():
            torch.testing.assert_close(packed_logits(model(), alone)[0], both[row], rtol=0, atol=EXACT)


def test_the_slope_through_a_training_sequence_is_that_of_the_reference() -> None:
    history, moment, candidates = [4, 5, 6, 7], 3, [9, 2]
    ids = history[:moment] + [item + NUM_ITEMS for item in candidates]
    positions = torch.from_numpy(FORMAT.positions(ids))
    reference = model().logits(model()(torch.tensor([ids]), positions[:1], isolation_mask(positions).unsqueeze(0)))
    expected = torch.autograd.grad(reference[0, moment:].square().sum(), list(model().parameters()))
    packed = Packed(torch.tensor([history]), torch.tensor([[moment]]), torch.tensor([[candidates]]))
    got = torch.autograd.grad(packed_logits(model(), packed).square().sum(), list(model().parameters()))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [0, LONGEST])
def test_shortest_and_longest_histories(length: int) -> None:
    assert torch.isfinite(scores([1] * length, [[2], [3, 4]])).all()
