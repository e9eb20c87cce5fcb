"""RankingFormat: what the tokens alone say about history and candidates."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError, InvalidUserRequestError
from userkv.ranking.prompt import HISTORY, RankingFormat

NUM_ITEMS = 50
MARKER = 3
FORMATS = st.sampled_from([RankingFormat(candidate_offset=NUM_ITEMS), RankingFormat(candidate_marker=MARKER)])
ITEMS = st.lists(st.integers(MARKER + 1, NUM_ITEMS - 1), min_size=1, max_size=3)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[RankingFormat, list[list[int]], list[list[int]]]:
    return draw(FORMATS), draw(st.lists(ITEMS, max_size=6)), draw(st.lists(ITEMS, max_size=6))


def tokens(form: RankingFormat, history: list[list[int]], candidates: list[list[int]]) -> list[int]:
    return [token for item in history for token in item] + [
        token for item in candidates for token in form.candidate(item)
    ]


@given(prompts())
def test_starts_are_where_candidates_were_put(case: tuple[RankingFormat, list[list[int]], list[list[int]]]) -> None:
    form, history, candidates = case
    ids = tokens(form, history, candidates)
    lengths = [len(form.candidate(item)) for item in candidates]
    history_len = len(ids) - sum(lengths)
    expected = [history_len + sum(lengths[:number]) for number in range(len(lengths))]
    assert form.starts(ids).tolist() == expected
    form.check(ids, history_len)
    for wrong in {history_len - 1, history_len + 1, -1}:
        with pytest.raises(InvalidUserRequestError, match=f"send history_len={history_len}"):
            form.check(ids, wrong)


@given(prompts())
def test_each_candidate_has_the_positions_it_would_have_alone(
    case: tuple[RankingFormat, list[list[int]], list[list[int]]],
) -> None:
    form, history, candidates = case
    ids = tokens(form, history, candidates)
    positions = form.positions(ids)
    assert (positions.shape, positions.dtype) == ((3, len(ids)), np.int64)
    history_len = len(tokens(form, history, []))
    assert positions[0, :history_len].tolist() == list(range(history_len))
    assert (positions[1, :history_len] == HISTORY).all()
    assert (positions[2] == history_len).all()
    at = history_len
    for item in candidates:
        alone = form.positions(tokens(form, history, [item]))[:, history_len:]
        own = positions[:, at : at + alone.shape[1]]
        assert own[0].tolist() == alone[0].tolist()
        assert (own[1] == at).all()
        at += alone.shape[1]
    assert at == len(ids)


@given(prompts())
def test_a_chunk_needs_no_more_than_its_positions(
    case: tuple[RankingFormat, list[list[int]], list[list[int]]],
) -> None:
    # What a token attends to follows from its own column, so a chunk of a prompt needs to know nothing of the others.
    form, history, candidates = case
    ids = tokens(form, history, candidates)
    positions = form.positions(ids)
    seen = [
        {key for key in range(query + 1) if key < positions[2, query] or key >= positions[1, query] > HISTORY}
        for query in range(len(ids))
    ]
    starts = [*form.starts(ids).tolist(), len(ids)]
    history_len = starts[0]
    for query in range(history_len):
        assert seen[query] == set(range(query + 1))
    for first, end in pairwise(starts):
        for query in range(first, end):
            assert seen[query] == set(range(history_len)) | set(range(first, query + 1))
            assert positions[0, query] == history_len + query - first


@given(prompts())
def test_item_tokens_begin_no_candidate(case: tuple[RankingFormat, list[list[int]], list[list[int]]]) -> None:
    form, history, candidates = case
    assert len(form.starts([token for item in history + candidates for token in item])) == 0


def test_no_tokens() -> None:
    form = RankingFormat(candidate_offset=5)
    assert form.positions([]).shape == (3, 0)
    form.check([], 0)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({}, "either candidate_offset or candidate_marker"),
        ({"candidate_offset": 5, "candidate_marker": 3}, "either candidate_offset or candidate_marker"),
        ({"candidate_offset": -1}, "candidate_offset must be a token id"),
        ({"candidate_marker": "3"}, "candidate_marker must be a token id"),
        ({"candidate_marker": True}, "candidate_marker must be a token id"),
        ({"candidate_offset": 5.0}, "candidate_offset must be a token id"),
    ],
)
def test_sections_that_are_none(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSettingError, match=reason):
        RankingFormat.from_config(section)


@pytest.mark.parametrize(
    ("ids", "limits", "says"),
    [
        ([5, 6, MARKER], {}, "a candidate at token 2 has no item's tokens"),
        ([5, MARKER, MARKER, 6], {}, "a candidate at token 1 has no item's tokens"),
        ([5, 6, 7, MARKER, 8], {"max_history_tokens": 2}, "the history has 3 tokens and the model takes 2"),
        ([5, 6, 7], {"max_history_tokens": 2}, "the history has 3 tokens and the model takes 2"),
        ([5, MARKER, 6, MARKER, 7, 8, 9], {"max_item_tokens": 2}, "at token 3 has 3 tokens; the model takes 2"),
    ],
)
def test_prompts_that_cannot_be_ranked(ids: list[int], limits: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidUserRequestError, match=says):
        RankingFormat(candidate_marker=MARKER).check(ids, **limits)


def test_a_first_token_that_was_moved_is_a_whole_candidate() -> None:
    RankingFormat(candidate_offset=NUM_ITEMS).check([5, NUM_ITEMS + 1], 1, 1, 1)
