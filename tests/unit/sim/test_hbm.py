"""Simulations against the real thing: vLLM's scheduler and block pool, with UserKV in them, and no model."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.traces import sim_request
from userkv.cache.policies import POLICIES, make_policy
from userkv.cache.settings import POLICY
from userkv.sim.apc import ApcSimulation
from userkv.sim.hbm import HbmSimulation
from userkv.sim.trace import SimRequest

BLOCK_SIZE, LONGEST, CANDIDATES = 4, 48, 12
"""As the oracle has them: a prompt of at most 64 tokens, with one more for the answer."""

LEAST_BLOCKS = -(-(LONGEST + CANDIDATES) // BLOCK_SIZE)

tokens = st.integers(0, 4)


@st.composite
def traces(draw: Any) -> list[SimRequest]:
    """Users whose histories grow, shrink, change and begin alike."""
    histories: dict[str, list[int]] = {user: [ord(user) % 2] * draw(st.integers(0, 30)) for user in "abcdef"}
    trace = []
    for _ in range(draw(st.integers(1, 30))):
        user = draw(st.sampled_from("abcdef"))
        history = histories[user]
        change = draw(st.sampled_from(["same", "same", "grow", "grow", "shrink", "edit", "new"]))
        if change == "grow":
            history = history + draw(st.lists(tokens, min_size=1, max_size=8))
        elif change == "shrink":
            history = history[: draw(st.integers(0, LONGEST))]
        elif change == "edit" and history:
            at = draw(st.integers(0, len(history) - 1))
            history = [*history[:at], 4 - history[at], *history[at + 1 :]]
        elif change == "new":
            history = draw(st.lists(tokens, max_size=LONGEST))
        histories[user] = history[:LONGEST]
        candidates = draw(st.integers(0 if histories[user] else 1, CANDIDATES))
        trace.append(sim_request(user, histories[user], candidates))
    return trace


same_process = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("policy", POLICIES)
@given(trace=traces(), num_blocks=st.integers(LEAST_BLOCKS, 3 * LEAST_BLOCKS))
@same_process
def test_users_hit_in_the_simulation_what_they_hit_in_the_engine(
    policy: str, trace: list[SimRequest], num_blocks: int, patched_vllm: pytest.MonkeyPatch
) -> None:
    from tests.support.sequential import SequentialEngine

    patched_vllm.setenv(POLICY, policy)
    engine = SequentialEngine(num_blocks, named=True)
    simulation = HbmSimulation(BLOCK_SIZE, num_blocks, make_policy(policy, num_blocks))
    for request in trace:
        assert simulation.request(request) == engine.request(request)
        simulation.cache.check_integrity()


@given(trace=traces(), num_blocks=st.integers(LEAST_BLOCKS, 3 * LEAST_BLOCKS))
@same_process
def test_prefixes_hit_in_the_simulation_what_they_hit_in_vllm(
    trace: list[SimRequest], num_blocks: int, patched_vllm: pytest.MonkeyPatch
) -> None:
    from tests.support.sequential import SequentialEngine

    engine = SequentialEngine(num_blocks, named=False)
    simulation = ApcSimulation(BLOCK_SIZE, num_blocks)
    for request in trace:
        assert simulation.request(request) == engine.request(request)


@given(trace=traces(), waiting=st.integers(0, 8), concurrency=st.integers(1, 3), whole_users=st.booleans())
def test_requests_that_wait_all_start(
    trace: list[SimRequest], waiting: int, concurrency: int, whole_users: bool
) -> None:
    """And nothing of them is left behind: with nobody running, all blocks are the table's or free."""
    simulation = HbmSimulation(
        BLOCK_SIZE, LEAST_BLOCKS, make_policy("lru", LEAST_BLOCKS), concurrency, whole_users, waiting
    )
    result = simulation.run(trace)
    assert result.prompt_tokens == sum(len(each.history) + each.new_tokens for each in trace)
    assert 0 <= result.hit_tokens < result.prompt_tokens
    simulation.cache.check_integrity()
    assert simulation.cache.table.busy_users() == []
    assert simulation._pool.num_free == LEAST_BLOCKS - simulation.cache.table.num_blocks
    assert simulation.cache.stats.take()["history_tokens"] == sum(len(each.history) for each in trace)


def test_who_waits_is_spared() -> None:
    """The least recent user keeps his three blocks if his request is the next, and one of them otherwise."""
    trace = [sim_request(user, [ord(user)] * 12) for user in "abca"]

    def hits(waiting: int) -> int:
        return HbmSimulation(BLOCK_SIZE, 8, make_policy("lru", 8), waiting=waiting).run(trace).hit_tokens

    assert [hits(0), hits(1)] == [4, 12]


def test_what_is_larger_than_the_cache_is_left_out() -> None:
    simulation = HbmSimulation(BLOCK_SIZE, 4, make_policy("lru", 4))
    trace = [sim_request("a", [1] * 8), sim_request("b", [1] * 20), sim_request("a", [1] * 8)]
    assert simulation.run(trace).hit_tokens == 8
    simulation.cache.check_integrity()
    assert simulation.cache.table.busy_users() == []
