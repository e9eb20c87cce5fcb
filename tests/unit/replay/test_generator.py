"""The generator: the shape that its settings ask for, and the same one again with the same seed."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from userkv.core.errors import InvalidSettingError
from userkv.logs.work_request import WorkRequest
from userkv.replay.generator import GAP_CLASSES, GeneratorSettings, event_gaps, generate, history_lengths

SMALL = GeneratorSettings(users=50, requests=400, median_history=30, max_history=200, items=5_000, candidates=(4, 8))


@pytest.fixture(scope="module")
def small() -> list[WorkRequest]:
    return list(generate(SMALL))


def test_requests_are_in_order_of_time_and_complete(small: list[WorkRequest]) -> None:
    assert len(small) == SMALL.requests
    assert [request.time for request in small] == sorted(request.time for request in small)
    assert small[0].time >= 0


def test_histories_grow_between_requests(small: list[WorkRequest]) -> None:
    lengths: dict[str, int] = {}
    growth = []
    for request in small:
        before = lengths.get(request.user)
        if before is not None:
            growth.append(len(request.new_items))
        assert request.history_items_total == (before or 0) + len(request.new_items) - request.drop
        assert request.history_items_total <= SMALL.max_history
        lengths[request.user] = request.history_items_total
    assert min(growth) >= 1
    assert np.mean(growth) == pytest.approx(SMALL.growth, rel=0.1)
    assert any(request.drop for request in small)


def test_candidates_are_fresh_each_time(small: list[WorkRequest]) -> None:
    seen: dict[str, set[int]] = {}
    for request in small:
        seen.setdefault(request.user, set()).update(request.new_items)
        assert not seen[request.user] & set(request.candidates)
        assert 4 <= len(request.candidates) <= 8
    assert len({frozenset(request.candidates) for request in small}) == len(small)


def test_the_seed_decides(small: list[WorkRequest]) -> None:
    assert list(generate(SMALL)) == small
    other = GeneratorSettings(users=50, requests=400, median_history=30, max_history=200, items=5_000, seed=1)
    assert next(generate(other)) != small[0]


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_popularity_follows_zipf(exponent: float) -> None:
    settings = GeneratorSettings(
        users=100, requests=15_000, zipf=exponent, median_history=2, growth=1, candidates=(2, 2), max_history=50
    )
    counts = Counter(request.user for request in generate(settings))
    ranked = np.array([counts[f"u{rank}"] for rank in range(40)])
    slope = np.polyfit(np.log(np.arange(1, 41)), np.log(ranked), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.1)


def test_history_lengths_have_the_published_tail() -> None:
    settings = GeneratorSettings(users=50_000, median_history=512, max_history=100_000)
    lengths = history_lengths(settings, np.random.default_rng(0))
    median, p90, p99 = np.percentile(lengths, [50, 90, 99])
    assert median == pytest.approx(512, rel=0.03)
    assert p90 / median == pytest.approx(24_587 / 8_594, rel=0.03)
    assert p99 / median > 6
    assert lengths.max() > 20 * median
    capped = history_lengths(GeneratorSettings(users=1_000, max_history=600), np.random.default_rng(0))
    assert capped.max() == 600
    assert capped.min() >= 1


def test_gaps_between_events_have_the_published_shares() -> None:
    gaps = event_gaps(100_000, np.random.default_rng(0))
    assert (gaps < 1).mean() == pytest.approx(0.828, abs=0.005)
    assert ((gaps >= 60) & (gaps < 300)).mean() == pytest.approx(0.065, abs=0.004)
    assert (gaps > 7_200).mean() == pytest.approx(0.006, abs=0.001)
    assert gaps.min() >= 0.01
    assert sum(share for share, _, _ in GAP_CLASSES) == pytest.approx(1)


def test_requests_of_a_user_come_in_bursts() -> None:
    # With one event per request, the gaps between requests are those between events.
    settings = GeneratorSettings(users=20, requests=8_000, growth=1, median_history=2, candidates=(2, 2), max_history=9)
    last: dict[str, float] = {}
    gaps = []
    for request in generate(settings):
        if request.user in last:
            gaps.append(request.time - last[request.user])
        last[request.user] = request.time
    found = np.array(gaps)
    assert (found < 1).mean() == pytest.approx(0.828, abs=0.02)
    assert ((found >= 60) & (found < 300)).mean() == pytest.approx(0.065, abs=0.01)
    assert (found > 7_200).mean() == pytest.approx(0.006, abs=0.004)


@pytest.mark.parametrize(
    "numbers",
    [
        {"users": 0},
        {"requests": 0},
        {"items": 0},
        {"median_history": 0},
        {"zipf": -1.0},
        {"zipf": float("nan")},
        {"p90_ratio": 0.5},
        {"growth": 0.5},
        {"max_history": 100},
        {"candidates": (0, 3)},
    ],
)
def test_numbers_that_cannot_be_used(numbers: dict[str, object]) -> None:
    with pytest.raises(InvalidSettingError):
        list(islice(generate(GeneratorSettings(**numbers)), 1))  # type: ignore[arg-type]
