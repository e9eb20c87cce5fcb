"""The default policy: it is nearly as good as the better one of its extremes, whatever the traffic is, and stays small.

What every policy must do is in test_policies.py.
"""

from functools import cache, partial
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.names import StableName
from tests.support.traces import trace_of
from userkv.cache.policies import ADAPTIVE, FREQUENCY, LRU, adaptive, make_policy
from userkv.cache.policies.adaptive import HALF_LIVES, MOST_SHADOW_USERS, AdaptiveUserPolicy
from userkv.cache.policies.policy import EvictionPolicy
from userkv.cache.policies.worth import RequestWorth
from userkv.sim.hbm import HbmSimulation

BLOCK_SIZE = 128
USERS = 70

TRACES = {"gr": 1000, "drifting": 1500, "published": 1500}
"""Scenario of the suite -> requests."""

WORST_IS = {"gr": LRU, "drifting": FREQUENCY, "published": FREQUENCY}
"""Scenario -> which policy of one half-life does not suit it."""

ENOUGH = 0.97
"""Of the hits of the better one of LRU and frequency."""


@cache
def hit_ratio(policy: str, scenario: str, concurrency: int) -> float:
    trace, num_blocks = trace_of(scenario, TRACES[scenario])
    simulation = HbmSimulation(BLOCK_SIZE, num_blocks, make_policy(policy, num_blocks), concurrency)
    ratio = simulation.run(trace).hit_ratio
    simulation.cache.check_integrity()
    return ratio


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("scenario", TRACES)
def test_hits_nearly_as_much_as_the_policy_that_suits_the_traffic(scenario: str, concurrency: int) -> None:
    best = max(hit_ratio(policy, scenario, concurrency) for policy in (LRU, FREQUENCY))
    assert hit_ratio(ADAPTIVE, scenario, concurrency) >= ENOUGH * best


@pytest.mark.parametrize("scenario", TRACES)
def test_no_single_half_life_does(scenario: str) -> None:
    """This is why the default adapts."""
    best = max(hit_ratio(policy, scenario, 1) for policy in (LRU, FREQUENCY, ADAPTIVE))
    assert hit_ratio(WORST_IS[scenario], scenario, 1) < ENOUGH * best


def test_the_half_life_follows_the_traffic() -> None:
    """First, users come three times in a row and never again; then a few come for ever among many that come once."""
    policy: AdaptiveUserPolicy[StableName] = AdaptiveUserPolicy(40)
    for visit in range(3000):
        policy.count_request(StableName(f"visitor{(visit + visit % 3 * 5) // 3}"), 1)
    recent = policy.half_life
    random = Random(0)
    for visit in range(6000):
        regular = f"regular{random.randrange(30)}" if visit % 3 == 0 else f"stranger{visit}"
        policy.count_request(StableName(regular), 1)
    assert recent < max(HALF_LIVES)
    assert policy.half_life > recent


steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "discard", "request", "request"]), st.integers(0, USERS - 1)),
    max_size=120,
)


@given(crowd=st.integers(1, USERS), steps=steps)
def test_a_victim_stays_the_victim_until_he_is_discarded(crowd: int, steps: list[tuple[str, int]]) -> None:
    """Requests of others, or better victims that come, do not change the answer: he would keep a useless tail."""
    policy: AdaptiveUserPolicy[int] = AdaptiveUserPolicy(crowd)
    for user in range(crowd):
        policy.count_request(user, 1)
        policy.add(user)
    victim = policy.victim()
    for action, user in steps:
        if action == "add" and user not in policy:
            policy.add(user)
        elif action == "request":
            policy.count_request(user, 1)
        elif action == "discard":
            policy.discard(user)
        if victim not in policy:
            victim = policy.victim()
            assert victim in policy or not len(policy)
        assert policy.victim() == victim


def users_by_zipf(count: int, users: int, seed: int) -> list[StableName]:
    names = [StableName(f"u{user}") for user in range(users)]
    shares = list(accumulate((rank + 1) ** -0.9 for rank in range(users)))
    return Random(seed).choices(names, cum_weights=shares, k=count)


def hits_of(policy: EvictionPolicy[StableName], capacity: int, trace: list[StableName]) -> int:
    """Users of one block each, one at a time."""
    hits = 0
    for user in trace:
        policy.count_request(user, 1)
        if user in policy:
            hits += 1
            policy.discard(user)
        elif len(policy) >= capacity:
            victim = policy.victim()
            assert victim is not None
            policy.discard(victim)
        policy.add(user)
    return hits


def test_many_users_are_watched_in_a_sample_which_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = 8 * MOST_SHADOW_USERS
    trace = users_by_zipf(30_000, 4 * capacity, seed=0)
    sampled: AdaptiveUserPolicy[StableName] = AdaptiveUserPolicy(capacity)
    hits = hits_of(sampled, capacity, trace)
    assert sampled._rate >= 8
    watched = sum(sampled._is_watched(user) for user in set(trace))
    assert watched == pytest.approx(len(set(trace)) / sampled._rate, rel=0.2)
    monkeypatch.setattr(adaptive, "MOST_SHADOW_USERS", 10**9)
    every: AdaptiveUserPolicy[StableName] = AdaptiveUserPolicy(capacity)
    assert hits == pytest.approx(hits_of(every, capacity, trace), rel=0.02)
    assert every._rate == 1


def test_more_users_are_watched_again_when_they_become_few() -> None:
    policy: AdaptiveUserPolicy[StableName] = AdaptiveUserPolicy(8 * MOST_SHADOW_USERS)
    hits_of(policy, 8 * MOST_SHADOW_USERS, users_by_zipf(20_000, 20_000, seed=2))
    assert policy._rate >= 8
    for user in users_by_zipf(20_000, 500, seed=3):
        policy.count_request(user, 64)
    assert policy._rate == 1
    assert {len(shadow) for shadow in policy._shadows} == {8 * MOST_SHADOW_USERS // 64}


def test_a_limit_of_users_is_part_of_the_capacity() -> None:
    """Users come six times in a row, forty of them at a time: with room for fifty, who has left is of no use."""
    blocks, max_users = 10_000, 50
    order = [StableName(f"u{40 * (visit // 240) + visit % 40}") for visit in range(9600)]
    told: AdaptiveUserPolicy[StableName] = AdaptiveUserPolicy(blocks, max_users)
    hits = hits_of(told, max_users, order)
    assert told.half_life == min(HALF_LIVES)
    assert hits >= 0.95 * hits_of(make_policy(LRU, blocks), max_users, order)
    assert hits > 1.5 * hits_of(AdaptiveUserPolicy(blocks), max_users, order)


@pytest.mark.parametrize(("slots_per_user", "gained"), [(64, True), (1, False)])
def test_fifty_slots_per_user_keep_what_counting_gains(
    slots_per_user: int, gained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all requests are of users who come once, which LRU keeps, and the counts need not."""
    capacity = 512
    random = Random(4)
    names = (f"u{random.randrange(400)}" if visit % 2 else f"once{visit}" for visit in range(20_000))
    trace = [StableName(name) for name in names]
    lru = hits_of(make_policy(LRU, capacity), capacity, trace)
    best = hits_of(AdaptiveUserPolicy(capacity), capacity, trace)
    monkeypatch.setattr(adaptive, "RequestWorth", partial(RequestWorth, slots=slots_per_user * capacity))
    hits = hits_of(AdaptiveUserPolicy(capacity), capacity, trace)
    assert best > 1.3 * lru
    assert (hits - lru > 0.7 * (best - lru)) == gained


def test_few_users_are_all_watched() -> None:
    policy: AdaptiveUserPolicy[StableName] = AdaptiveUserPolicy(MOST_SHADOW_USERS)
    hits_of(policy, MOST_SHADOW_USERS, users_by_zipf(3000, 2000, seed=1))
    assert policy._rate == 1


@pytest.mark.parametrize("size", [0, 1, 3])
def test_nothing_grows_with_the_users_that_were_ever_seen(size: int) -> None:
    policy: AdaptiveUserPolicy[StableName] = AdaptiveUserPolicy(10_000)
    slots = [len(policy._worth.by(which)) for which in range(len(HALF_LIVES))]
    for user in range(30_000):
        policy.count_request(StableName(f"u{user}"), size)
    assert [len(policy._worth.by(which)) for which in range(len(HALF_LIVES))] == slots
    assert all(len(shadow) <= 2 * MOST_SHADOW_USERS for shadow in policy._shadows)
    assert len(policy) == 0


def test_clear_forgets_the_victim() -> None:
    policy: AdaptiveUserPolicy[int] = AdaptiveUserPolicy(4)
    policy.add(1)
    assert policy.victim() == 1
    policy.clear()
    policy.add(2)
    assert policy.victim() == 2
