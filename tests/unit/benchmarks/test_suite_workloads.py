"""The suite's workloads and scenarios: what they promise, and how much memory they ask for."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.suite import workloads
from benchmarks.suite.policies import SIMULATED, sim_requests
from benchmarks.suite.scenarios import (
    AMPLE,
    BLOCK_SIZE,
    LEAST_PROMPTS,
    QUICK_SCENARIOS,
    SCENARIOS,
    Scenario,
    sizes_of,
)
from benchmarks.suite.systems import SYSTEMS
from benchmarks.suite.workloads import (
    AHEAD_SECONDS,
    CANDIDATES,
    LONGEST,
    SHORTEST,
    TOKENS_PER_ITEM,
    TRACE_HASHES,
    TRACE_ITEMS,
)

from userkv.logs.work_request import WorkRequest
from userkv.logs.workload_file import read_workload, write_workload

REQUESTS = 60

SMALL = Scenario("s", "s", lambda data, requests: iter(()), 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs in the formats of the public ones."""
    directory = tmp_path_factory.mktemp("data")
    for name in ("movielens-latest-small", "otto", "mooncake-traces"):
        (directory / name).mkdir()
    ratings = "".join(f"{n % 7},{n},4.0,{n}\n" for n in range(7 * 150))
    (directory / "movielens-latest-small" / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + ratings)
    sessions = (
        {"session": n, "events": [{"aid": 40 * n + at, "ts": 1000 * at, "type": "clicks"} for at in range(30)]}
        for n in range(8)
    )
    (directory / "otto" / "train_sample.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sessions))
    trace = ({"timestamp": 100 * n, "hash_ids": list(range(1 + n % (TRACE_HASHES + 2)))} for n in range(100))
    (directory / "mooncake-traces" / "conversation_trace.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in trace)
    )
    return directory


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name)
def scenario(request: pytest.FixtureRequest) -> Scenario:
    made: Scenario = request.param
    return made


def histories(requests: list[WorkRequest]) -> list[tuple[int, ...]]:
    """The whole history of each request."""
    known: dict[str, tuple[int, ...]] = {}
    found = []
    for request in requests:
        known[request.user] = (known.get(request.user, ()) + request.new_items)[request.drop :]
        found.append(known[request.user])
    return found


def test_as_many_requests_as_asked_for_and_always_the_same(scenario: Scenario, data: Path) -> None:
    requests = list(scenario.make(data, REQUESTS))
    assert len(requests) == REQUESTS
    assert requests == list(scenario.make(data, REQUESTS))


def test_histories_grow_and_candidates_are_fresh(scenario: Scenario, data: Path) -> None:
    requests = list(scenario.make(data, REQUESTS))
    assert all(earlier.time <= later.time for earlier, later in pairwise(requests))
    for request, history in zip(requests, histories(requests), strict=True):
        assert len(history) == request.history_items_total > 0
        if not request.anonymous:
            assert not set(request.candidates) & set(history)
            assert len(set(request.candidates)) == len(request.candidates)


def test_tokens_are_those_of_the_items(scenario: Scenario, data: Path) -> None:
    requests = list(scenario.make(data, REQUESTS))
    simulated = sim_requests(requests)
    for request, history, made in zip(requests, histories(requests), simulated, strict=True):
        assert made.user == request.user
        assert made.history.tolist() == [item for item in history for _ in range(TOKENS_PER_ITEM)]
        assert made.new_tokens == TOKENS_PER_ITEM * len(request.candidates)


def test_written_and_read_back(scenario: Scenario, data: Path, tmp_path: Path) -> None:
    requests = list(scenario.make(data, REQUESTS))
    write_workload(requests, tmp_path / "w.jsonl", TOKENS_PER_ITEM)
    assert read_workload(tmp_path / "w.jsonl").requests == requests


def test_all_fit_into_the_memory_they_ask_for(scenario: Scenario, data: Path) -> None:
    requests = list(scenario.make(data, REQUESTS))
    sizes = sizes_of(scenario, requests)
    longest = max(TOKENS_PER_ITEM * (each.history_items_total + len(each.candidates)) for each in requests)
    assert longest < sizes.max_model_len <= (sizes.hbm_blocks - 1) * BLOCK_SIZE // LEAST_PROMPTS
    assert sizes.pool_bytes == scenario.pool_bytes


@pytest.mark.parametrize(("name", "named"), [("ordinary", 0), ("conversations", 0), ("mixed", REQUESTS // 2)])
def test_nobody_is_named_where_requests_are_ordinary(name: str, named: int, data: Path) -> None:
    scenario = next(each for each in SCENARIOS if each.name == name)
    assert sum(not request.anonymous for request in scenario.make(data, REQUESTS)) == named


def test_all_others_name_their_users(scenario: Scenario, data: Path) -> None:
    if scenario.name not in ("ordinary", "conversations", "mixed"):
        assert not any(request.anonymous for request in scenario.make(data, REQUESTS))


def lengths(made: Iterator[WorkRequest]) -> dict[str, list[int]]:
    by_user: dict[str, list[int]] = {}
    for request in made:
        by_user.setdefault(request.user, []).append(request.history_items_total)
    return by_user


@pytest.mark.parametrize("make", [workloads.recommender, workloads.drifting, workloads.candidate_heavy, workloads.cold])
def test_histories_that_stay(make: Callable[[int], Iterator[WorkRequest]]) -> None:
    for of_user in lengths(make(200)).values():
        assert len(set(of_user)) == 1
        assert SHORTEST <= of_user[0] <= LONGEST


def test_histories_that_grow() -> None:
    found = lengths(workloads.growing(300)).values()
    assert max(map(len, found)) > 5
    assert all(later - earlier == 16 for of_user in found for earlier, later in pairwise(of_user))


def test_a_visit_is_five_requests() -> None:
    requests = list(workloads.bursts(50))
    for visit in range(0, 50, 5):
        assert len({request.user for request in requests[visit : visit + 5]}) == 1


def test_a_session_starts_without_candidates_and_ranks_later() -> None:
    requests = list(workloads.sessions(40))
    assert [request.time for request in requests] == sorted(request.time for request in requests)
    ranks = [request for request in requests if request.candidates]
    ranked = [(start.user, start.time + AHEAD_SECONDS) for start in requests if not start.candidates]
    assert [(rank.user, rank.time) for rank in ranks] == ranked
    assert all(not rank.new_items for rank in ranks)
    assert all(CANDIDATES[0] <= len(rank.candidates) <= CANDIDATES[1] for rank in ranks)


def test_visits_are_the_rankings_of_sessions() -> None:
    ranks = [request for request in workloads.sessions(80) if request.candidates]
    visits = list(workloads.visits(40))
    assert [(visit.user, visit.time) for visit in visits] == [(rank.user, rank.time) for rank in ranks]
    assert lengths(iter(visits)) == lengths(iter(ranks))


def test_cold_users_come_once() -> None:
    assert len(lengths(workloads.cold(50))) == 50


def test_the_most_active_users_change() -> None:
    requests = list(workloads.drifting(1500))
    first, last = (
        sorted(of, key=lambda user: -len(of[user]))[:5]
        for of in (lengths(iter(requests[:150])), lengths(iter(requests[-150:])))
    )
    assert not set(first) & set(last)


def test_ordinary_requests_of_a_mixture_begin_alike() -> None:
    ordinary = [request for request in workloads.mixed(REQUESTS) if request.anonymous]
    openings = [request.new_items for request in ordinary]
    assert 1 < len(set(openings)) < len(openings)
    assert len({request.candidates for request in ordinary}) == len(ordinary)


def test_the_trace_keeps_what_its_prompts_share(data: Path) -> None:
    prompts = [request.new_items + request.candidates for request in workloads.conversations(data, 40)]
    assert {len(prompt) for prompt in prompts} == {TRACE_ITEMS * count for count in range(2, TRACE_HASHES + 1)}
    shorter, longer = prompts[0], prompts[1]
    assert longer[: len(shorter)] == shorter


def test_memory_is_a_share_of_the_histories() -> None:
    """Ten users of 640 items, 10 blocks each: a quarter of 100, beside vLLM's null block."""
    requests = [WorkRequest(float(user), f"u{user}", tuple(range(640)), 640, (1, 2)) for user in range(10)]
    again = WorkRequest(11.0, "u1", (), 640, (3,))
    sizes = sizes_of(SMALL, [*requests, again])
    # The longest prompt has 1,284 tokens and one more for the answer: 11 blocks, and four such prompts must fit.
    assert (sizes.max_model_len, sizes.hbm_blocks, sizes.pool_bytes) == (11 * BLOCK_SIZE, 4 * 11 + 1, AMPLE)
    requests += [WorkRequest(20.0, f"v{user}", tuple(range(640)), 640, (1, 2)) for user in range(30)]
    assert sizes_of(SMALL, requests).hbm_blocks == 400 // 4 + 1


def test_scenarios_name_systems_that_there_are() -> None:
    for scenarios in (SCENARIOS, QUICK_SCENARIOS):
        names = [each.name for each in scenarios]
        assert len(set(names)) == len(names)
        for each in scenarios:
            assert each.systems
            assert set(each.systems) <= set(SYSTEMS)
            assert set(each.fewer) <= set(each.systems)
    at_length = {each.name: each for each in SCENARIOS}
    assert set(SIMULATED) <= set(at_length)
    for each in QUICK_SCENARIOS:
        assert each.requests < at_length[each.name].requests
        assert set(each.systems) <= set(at_length[each.name].systems)
