"""From events to requests: order, growth, halving, fresh candidates."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError
from userkv.logs.events import Event
from userkv.logs.work_request import WorkRequest
from userkv.replay.candidates import CandidateSampler
from userkv.replay.workload import build_requests

EVENTS = st.lists(
    st.builds(Event, user=st.sampled_from("abc"), time=st.integers(0, 20).map(float), item=st.integers(0, 9)),
    max_size=60,
)
# Items that nobody's history has, so that candidates can always be drawn.
OTHERS = [Event(f"n{item}", 0.0, item) for item in range(100, 200)]


def histories(requests: list[WorkRequest]) -> list[list[int]]:
    """The history of each request, put together from the differences."""
    present: dict[str, list[int]] = {}
    found = []
    for request in requests:
        history = [*present.get(request.user, []), *request.new_items][request.drop :]
        present[request.user] = history
        found.append(history)
    return found


@settings(max_examples=60)
@given(events=EVENTS, every=st.integers(1, 5), min_history=st.integers(1, 4))
def test_histories_are_what_the_user_did_so_far(events: list[Event], every: int, min_history: int) -> None:
    made = list(build_requests(events + OTHERS, every=every, candidates=(1, 4), min_history=min_history))
    requests = [request for request in made if not request.user.startswith("n")]
    in_time = sorted(events, key=lambda event: event.time)
    for user in {event.user for event in events}:
        did = [event.item for event in in_time if event.user == user]
        own = [request for request in requests if request.user == user]
        for history, request in zip(histories(own), own, strict=True):
            assert history == did[: len(history)]
            assert request.history_items_total == len(history) >= min_history
            assert request.drop == 0
        lengths = [request.history_items_total for request in own]
        assert all(after - before == every for before, after in itertools.pairwise(lengths))
    assert [request.time for request in made] == sorted(request.time for request in made)


@settings(max_examples=60)
@given(events=EVENTS, seed=st.integers(0, 5))
def test_candidates_are_fresh(events: list[Event], seed: int) -> None:
    requests = list(build_requests(events + OTHERS, every=2, candidates=(3, 6), seed=seed))
    sets = [frozenset(request.candidates) for request in requests]
    assert len(set(sets)) == len(sets)
    for history, request in zip(histories(requests), requests, strict=True):
        assert 3 <= len(request.candidates) <= 6
        assert len(set(request.candidates)) == len(request.candidates)
        assert not set(request.candidates) & set(history)
    assert requests == list(build_requests(events + OTHERS, every=2, candidates=(3, 6), seed=seed))


def test_a_long_history_loses_its_older_half_at_once() -> None:
    events = [Event("a", float(index), index) for index in range(12)] + [Event("b", 99.0, 1000 + n) for n in range(50)]
    requests = [r for r in build_requests(events, every=1, candidates=(2, 2), max_history=4) if r.user == "a"]
    lengths = [request.history_items_total for request in requests]
    assert lengths == [1, 2, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]
    assert [request.drop for request in requests] == [0, 0, 0, 0, 2, 0, 2, 0, 2, 0, 2, 0]
    assert histories(requests)[-1] == [8, 9, 10, 11]


@pytest.mark.parametrize("every", [1, 3, 7, 12])
def test_cuts_between_two_requests_add_up(every: int) -> None:
    events = [Event("a", float(index), index) for index in range(36)] + [Event("b", 99.0, 1000 + n) for n in range(50)]
    one_by_one = {
        request.time: history
        for request, history in _with_histories(build_requests(events, every=1, candidates=(2, 2), max_history=5))
    }
    some = _with_histories(build_requests(events, every=every, candidates=(2, 2), max_history=5))
    assert all(history == one_by_one[request.time] for request, history in some)


def _with_histories(made: object) -> list[tuple[WorkRequest, list[int]]]:
    requests = [request for request in made if request.user == "a"]  # type: ignore[attr-defined]
    return list(zip(requests, histories(requests), strict=True))


def test_the_number_of_requests_is_limited() -> None:
    assert len(list(build_requests(OTHERS, every=1, candidates=(1, 1), max_requests=7))) == 7
    assert list(build_requests([], every=1, candidates=(1, 1))) == []


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"every": 0}, "every 0"),
        ({"min_history": 0}, "at least 1 item"),
        ({"max_requests": 0}, "at least 1"),
        ({"max_history": 1}, "at least 2"),
        ({"max_history": 5, "min_history": 6}, "at least 6"),
        ({"candidates": (0, 4)}, "0:4"),
        ({"candidates": (5, 4)}, "5:4"),
    ],
)
def test_numbers_that_cannot_be_used(numbers: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidSettingError, match=reason):
        list(build_requests(OTHERS, **{"every": 1, "candidates": (1, 4), **numbers}))  # type: ignore[arg-type]


def test_sets_run_out() -> None:
    sampler = CandidateSampler(np.array([0, 1, 5]), (2, 2), np.random.default_rng(0))
    sets = [frozenset(sampler.draw(frozenset())) for _ in range(10)]
    assert len(set(sets)) == 10
    assert {frozenset(pair) for pair in [(0, 1), (0, 5), (1, 5)]} <= set(sets)
    assert max(set().union(*sets)) <= 10  # the smallest ids that are not in use


def test_a_user_who_has_seen_everything_gets_new_items() -> None:
    sampler = CandidateSampler(np.array([0, 2]), (3, 3), np.random.default_rng(0))
    assert sampler.draw({0, 2}) == (1, 3, 4)
    assert sampler.draw({0}) == (2, 5, 6)


def test_the_last_unseen_items_are_found() -> None:
    sampler = CandidateSampler(np.arange(10_000), (2, 2), np.random.default_rng(0))
    assert set(sampler.draw(frozenset(range(9_998)))) == {9_998, 9_999}
