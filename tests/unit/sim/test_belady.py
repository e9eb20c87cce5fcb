"""Belady's policy against every other one, and against all that could have been kept."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.traces import sim_request
from userkv.cache.policies import POLICIES, make_policy
from userkv.cache.policies.policy import EvictionPolicy
from userkv.core.request import UserKey
from userkv.sim.belady import BeladyPolicy
from userkv.sim.hbm import HbmSimulation
from userkv.sim.trace import SimRequest

BLOCK_SIZE = 4


def trace_of(users: str, blocks_per_user: int) -> list[SimRequest]:
    """Histories of whole blocks that do not change, so that a block is worth the same wherever it is."""
    return [sim_request(user, [ord(user)] * (BLOCK_SIZE * blocks_per_user)) for user in users]


def hits(policy: EvictionPolicy[UserKey], trace: list[SimRequest], num_blocks: int, whole_users: bool = False) -> int:
    simulation = HbmSimulation(BLOCK_SIZE, num_blocks, policy, whole_users=whole_users)
    result = simulation.run(trace)
    simulation.cache.check_integrity()
    return result.hit_tokens


def most(trace: list[SimRequest], num_blocks: int, whole_users: bool = False) -> int:
    """What Belady's policy hits."""
    return hits(BeladyPolicy(UserKey(request.user) for request in trace), trace, num_blocks, whole_users)


traces = st.text("abcdef", min_size=1, max_size=60)


@pytest.mark.parametrize("name", POLICIES)
@given(users=traces, blocks_per_user=st.integers(1, 3), spare=st.integers(0, 12))
def test_no_policy_hits_more(name: str, users: str, blocks_per_user: int, spare: int) -> None:
    trace, num_blocks = trace_of(users, blocks_per_user), blocks_per_user + 1 + spare
    assert most(trace, num_blocks) >= hits(make_policy(name, num_blocks), trace, num_blocks)


def most_hits(users: str, blocks_per_user: int, num_blocks: int) -> int:
    """By trying everything that could be kept of everybody before each request."""

    @cache
    def from_here(at: int, kept: tuple[tuple[str, int], ...]) -> int:
        if at == len(users):
            return 0
        held = dict(kept)
        hit = held.pop(users[at], 0) * BLOCK_SIZE
        room = num_blocks - blocks_per_user - 1  # Beside the request's own history and its block of candidates.
        best = 0
        for others in parts(tuple(sorted(held.items())), room):
            best = max(best, from_here(at + 1, tuple(sorted((*others, (users[at], blocks_per_user))))))
        return hit + best

    def parts(held: tuple[tuple[str, int], ...], room: int) -> list[tuple[tuple[str, int], ...]]:
        if not held:
            return [()]
        (user, blocks), *rest = held
        return [
            ((user, keep), *others) if keep else others
            for keep in range(min(blocks, room) + 1)
            for others in parts(tuple(rest), room - keep)
        ]

    return from_here(0, ())


@given(
    users=st.text("abcd", min_size=1, max_size=9),
    blocks_per_user=st.integers(1, 2),
    spare=st.integers(0, 4),
)
def test_equals_the_best_of_all_choices(users: str, blocks_per_user: int, spare: int) -> None:
    num_blocks = blocks_per_user + 1 + spare
    assert most(trace_of(users, blocks_per_user), num_blocks) == most_hits(users, blocks_per_user, num_blocks)


@given(users=traces, spare=st.integers(0, 12))
def test_parts_of_users_are_at_least_as_good_as_whole_ones(users: str, spare: int) -> None:
    trace, num_blocks = trace_of(users, 3), 4 + spare
    assert most(trace, num_blocks) >= most(trace, num_blocks, whole_users=True)


def test_a_whole_victim_leaves_nothing() -> None:
    """Of two users of three blocks each, with room for one and two blocks of the other."""
    trace = trace_of("aba", 3)
    assert most(trace, 6) == 2 * BLOCK_SIZE
    assert most(trace, 6, whole_users=True) == 0


def test_who_never_comes_again_goes_first() -> None:
    policy = BeladyPolicy("abcba")
    for user in "abc":
        policy.count_request(user, 1)
        policy.add(user)
    order = []
    while (victim := policy.victim()) is not None:
        order.append(victim)
        policy.discard(victim)
    assert order == ["c", "a", "b"]


def test_a_user_is_added_once() -> None:
    policy = BeladyPolicy("a")
    policy.add("a")
    with pytest.raises(ValueError, match="already"):
        policy.add("a")
