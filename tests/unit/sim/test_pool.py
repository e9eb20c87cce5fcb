"""A simulated pool under a simulated HBM."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.traces import sim_request
from userkv.cache.policies import POLICIES, make_policy
from userkv.core.request import UserKey
from userkv.sim.belady import BeladyPolicy
from userkv.sim.hbm import HbmSimulation
from userkv.sim.pool import PoolSimulation
from userkv.sim.trace import SimRequest, SimResult

BLOCK_SIZE = 4
HBM_BLOCKS = 12


@st.composite
def traces(draw: Any) -> list[SimRequest]:
    """Histories that grow, and sometimes lose their older half."""
    histories: dict[str, list[int]] = {}
    trace = []
    for user in draw(st.text("abcdefgh", max_size=50)):
        history = histories.setdefault(user, [])
        history += [ord(user) + place for place in range(draw(st.integers(0 if history else 1, 6)))]
        if len(history) > 40:
            del history[:20]
        trace.append(sim_request(user, history))
    return trace


def pool_of(room: int, hbm: str = "lru", pool: str = "lru") -> PoolSimulation:
    above = HbmSimulation(BLOCK_SIZE, HBM_BLOCKS, make_policy(hbm, HBM_BLOCKS))
    return PoolSimulation(BLOCK_SIZE, room, above, make_policy(pool, room))


def in_hbm(trace: list[SimRequest], policy: str = "lru") -> SimResult:
    return HbmSimulation(BLOCK_SIZE, HBM_BLOCKS, make_policy(policy, HBM_BLOCKS)).run(trace)


@given(trace=traces())
def test_a_pool_for_all_hits_whatever_was_computed_before(trace: list[SimRequest]) -> None:
    seen: dict[str, SimRequest] = {}
    expected = 0
    for request in trace:
        before = seen.get(request.user)
        if before is not None and (request.history[: len(before.history)] == before.history).all():
            expected += len(before.history)
        elif before is not None:
            old, new = before.history.tolist(), request.history.tolist()
            expected += next((at for at, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), len(new))
        seen[request.user] = request
    assert pool_of(10_000).run(trace).hit_tokens == expected


@pytest.mark.parametrize("policy", POLICIES)
@given(trace=traces())
def test_without_room_it_is_hbm_alone(policy: str, trace: list[SimRequest]) -> None:
    assert pool_of(0, hbm=policy).run(trace) == in_hbm(trace, policy)


@pytest.mark.parametrize("policy", POLICIES)
@given(trace=traces(), room=st.integers(0, 60))
def test_holds_no_more_than_it_has_room_for_and_loses_nothing_of_hbm(
    policy: str, trace: list[SimRequest], room: int
) -> None:
    pool = pool_of(room, pool=policy)
    hits = 0
    for request in trace:
        hits += pool._request(request)
        held = {key: len(history) for key, history in pool._histories.items()}
        assert pool._blocks == {key: -(-tokens // BLOCK_SIZE) for key, tokens in held.items()}
        assert sum(pool._blocks.values()) <= room
    assert in_hbm(trace).hit_tokens <= hits <= pool_of(10_000).run(trace).hit_tokens


def test_a_history_that_was_cut_is_another_one() -> None:
    pool = pool_of(100)
    long, cut = list(range(40)), list(range(20, 40))
    assert pool.run([sim_request("a", long), sim_request("a", cut), sim_request("a", cut)]).hit_tokens == 20


def test_the_pool_hears_of_what_hbm_serves_only_if_it_must() -> None:
    class Noting(BeladyPolicy[UserKey]):
        def count_request(self, user: UserKey, size: int) -> None:
            noted.append(user.user_id)
            super().count_request(user, size)

    trace = [sim_request(user, [1] * 8) for user in "aab"]
    for sees_all, expected in ((False, ["a", "b"]), (True, ["a", "a", "b"])):
        noted: list[str] = []
        above = HbmSimulation(BLOCK_SIZE, HBM_BLOCKS, make_policy("lru", HBM_BLOCKS))
        policy = Noting(UserKey(request.user) for request in trace)
        PoolSimulation(BLOCK_SIZE, 20, above, policy, sees_all).run(trace)
        assert noted == expected
