"""The goals: what each is computed from, and that a figure which is not there is not invented."""

import copy
import math
from typing import Any

import pytest
from benchmarks.suite.goals import GOALS, Goal, best, judge_all, median, ratio
from benchmarks.suite.policies import BELADY_WHOLE

from tests.support.suite import PUT_BYTES, SPEEDS, results

COMPLETE = results()


def named(start: str) -> Goal:
    (goal,) = (goal for goal in GOALS if goal.name.startswith(start))
    return goal


def test_names_tell_goals_apart() -> None:
    assert len({goal.name for goal in GOALS}) == len(GOALS) == len(judge_all({}))


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_a_goal_is_a_number_where_there_is_what_it_takes_and_none_elsewhere(goal: Goal) -> None:
    figure = goal.figure(COMPLETE)
    assert figure is not None
    assert math.isfinite(figure)
    for missing in ({}, {"scenarios": [], "policies": [], "micro": {}}, without_figures()):
        judged = goal.judge(missing)
        assert (judged["name"], judged["figure"], judged["met"]) == (goal.name, None, None)


def without_figures() -> dict[str, Any]:
    """Every run took place and told nothing, every script failed to say what it should."""
    found = copy.deepcopy(COMPLETE)
    for scenario in found["scenarios"]:
        for system in scenario["systems"].values():
            system["figures"] = {}
    found["micro"] = {script: {} for script in found["micro"]}
    return found


@pytest.mark.parametrize(("figure", "at_least", "at_most"), [(1.3, True, True), (1.31, True, False), (1, False, True)])
def test_met_and_missed(figure: float, at_least: bool, at_most: bool) -> None:
    up, down = (Goal("x", 1.3, way, lambda results: figure).judge({}) for way in (True, False))
    assert up == {"name": "x", "figure": figure, "target": ">= 1.3", "met": at_least, "missing": []}
    assert down == {"name": "x", "figure": figure, "target": "<= 1.3", "met": at_most, "missing": []}


@pytest.mark.parametrize(
    ("start", "figure", "met"),
    [
        ("pool for all: requests/s, best peer", SPEEDS["userkv-local"] / SPEEDS["offloading"], None),
        ("pool for all: requests/s, vLLM APC", SPEEDS["userkv-local"] / SPEEDS["apc"], True),
        ("pool for all: requests/s, no cache", SPEEDS["userkv-local"] / SPEEDS["no-cache"], True),
        ("p99 with histories prefetched", SPEEDS["offloading"] / SPEEDS["userkv-local"], None),
        ("pool of 512 MiB: token hit ratio", SPEEDS["userkv-local"] / 100, False),
        ("pool of 512 MiB: requests/s", SPEEDS["userkv-local"] / SPEEDS["offloading"], None),
        ("bytes written", PUT_BYTES["userkv-mooncake"] / PUT_BYTES["mooncake-store-connector"], True),
        ("HBM only: token hit ratio, vLLM APC", SPEEDS["userkv-hbm"] / SPEEDS["apc"], True),
        ("HBM only: token hit ratio, Belady", SPEEDS["userkv-hbm"] / 100 / 0.08, False),
        ("nobody is named", SPEEDS["userkv-hbm"] / SPEEDS["apc"], True),
        ("cold users:", SPEEDS["userkv-hbm"] / SPEEDS["apc"], True),
        ("swap-in from DRAM", 0.95, True),
        ("swap-in from Mooncake", 0.85, False),
        ("scheduler's cost per request: worst", 40.0, True),
        ("scheduler's cost per request: 64k", 1.5, True),
        ("a million users: bytes", 380.0, True),
        ("a million users: slowest", 12.0, False),
        ("layerwise", 0.9, True),
    ],
)
def test_what_each_goal_is_computed_from(start: str, figure: float, met: bool | None) -> None:
    """LMCache is left out, so it is not decided who is the best peer."""
    judged = named(start).judge(COMPLETE)
    assert judged["figure"] == pytest.approx(figure)
    assert judged["met"] is met


@pytest.mark.parametrize(("speed", "met"), [(1.5, True), (0.5, False)])
def test_whoever_could_make_a_figure_worse_is_needed_to_meet_a_goal_but_not_to_miss_it(speed: float, met: bool) -> None:
    found = copy.deepcopy(COMPLETE)
    (cold,) = (each for each in found["scenarios"] if each["name"] == "cold")
    cold["systems"]["apc"]["figures"]["requests_per_s"]["median"] = SPEEDS["userkv-hbm"] / speed
    goal = named("cold users:")
    assert (goal.judge(found)["met"], goal.judge(found)["missing"]) == (met, [])
    del cold["systems"]["userkv-mooncake"]
    assert (goal.judge(found)["met"], goal.judge(found)["missing"]) == (met and None, ["userkv-mooncake"])


def test_who_has_written_nothing_has_no_figure() -> None:
    found = copy.deepcopy(COMPLETE)
    found["scenarios"][0]["systems"]["userkv-mooncake"]["figures"]["put_bytes"]["median"] = 0
    assert named("bytes written").figure(found) is None


def test_prefetched_visits_are_compared_with_the_same_visits_only() -> None:
    found = copy.deepcopy(COMPLETE)
    (visits,) = (each for each in found["scenarios"] if each["name"] == "visits")
    visits["requests"] -= 1
    assert named("p99 with histories prefetched").figure(found) is None


def test_belady_is_the_one_with_as_many_requests_at_once_as_the_client_had() -> None:
    found = copy.deepcopy(COMPLETE)
    found["policies"][0]["hbm"] = {number: {BELADY_WHOLE: share} for number, share in (("8", 0.1), ("16", 0.12))}
    assert named("HBM only: token hit ratio, Belady").figure(found) == pytest.approx(0.06 / 0.12)


def test_a_system_that_was_left_out_is_not_compared() -> None:
    assert median(COMPLETE, "gr", "lmcache", "requests_per_s") is None
    assert best(COMPLETE, "gr", ("lmcache", "apc"), "requests_per_s") == SPEEDS["apc"]
    assert best(COMPLETE, "gr", ("lmcache",), "requests_per_s") is None
    assert best(COMPLETE, "gr", ("apc", "userkv-hbm"), "ttft_p50_s", least=True) == 1 / SPEEDS["userkv-hbm"]


def test_nothing_is_divided_by_nothing() -> None:
    assert ratio(1.0, 0.0) is None
    assert ratio(1.0, None) is None
    assert ratio(None, 1.0) is None
    assert ratio(0.0, 2.0) == 0.0
