"""The contract of :class:`EvictionPolicy`, for every policy there is."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.cache.policies import POLICIES, make_policy
from userkv.cache.policies.grace import GracePeriod
from userkv.cache.policies.lru import UserKVLRUManager
from userkv.cache.policies.policy import EvictionPolicy

steps = st.lists(st.tuples(st.sampled_from(["add", "discard", "evict", "request"]), st.integers(0, 6)), max_size=60)


def _with_grace(name: str) -> EvictionPolicy[Any]:
    """Everybody has a grace of three looks at the clock."""
    return GracePeriod(make_policy(name, 10), 3, iter(range(10**9)).__next__)


MAKERS: dict[str, Callable[[], EvictionPolicy[Any]]] = {
    **{name: lambda name=name: make_policy(name, 10) for name in POLICIES},  # type: ignore[misc]
    **{f"{name}, grace": lambda name=name: _with_grace(name) for name in POLICIES},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", MAKERS)
@given(steps=steps)
def test_victims_are_exactly_the_users_that_may_go(name: str, steps: list[tuple[str, int]]) -> None:
    policy: EvictionPolicy[int] = MAKERS[name]()
    held: set[int] = set()
    for action, user in steps:
        if action == "add" and user not in held:
            policy.add(user)
            held.add(user)
        elif action == "discard":
            policy.discard(user)
            held.discard(user)
        elif action == "request":
            policy.count_request(user, 1 + user)
        elif action == "evict":
            victim = policy.victim()
            assert "grace" in name or policy.victim() == victim  # There, time goes on with every look.
            assert (victim is None) == (not held)
            if victim is not None:
                assert victim in held
                policy.discard(victim)
                held.remove(victim)
        assert len(policy) == len(held)
        assert all((user in policy) == (user in held) for user in range(7))
    policy.clear()
    assert policy.victim() is None


@pytest.mark.parametrize("name", MAKERS)
def test_a_user_is_added_once(name: str) -> None:
    policy: EvictionPolicy[int] = MAKERS[name]()
    policy.add(1)
    with pytest.raises(ValueError, match="already"):
        policy.add(1)


@given(steps=steps)
def test_lru_evicts_in_the_order_of_last_use(steps: list[tuple[str, int]]) -> None:
    policy: UserKVLRUManager[int] = UserKVLRUManager()
    order: list[int] = []
    for action, user in steps:
        if action == "evict":
            assert policy.victim() == (order[0] if order else None)
        elif action == "request":
            policy.count_request(user, 1)  # Only the end of a request counts.
        else:
            policy.discard(user)
            order = [other for other in order if other != user]
            if action == "add":
                policy.add(user)
                order.append(user)


def test_who_was_just_used_goes_last_and_then_in_the_order_of_use() -> None:
    now = [0.0]
    policy: GracePeriod[int] = GracePeriod(make_policy("frequency", 10), 2.0, lambda: now[0])
    for user in (1, 1, 2, 2, 3):
        policy.count_request(user, 1)
    for user in (1, 2):
        policy.add(user)
    now[0] = 1.9
    policy.add(3)
    assert policy.victim() == 1, "all were just used"
    now[0] = 2.0
    assert policy.victim() == 1, "3 was asked for least often, but he was just used"
    now[0] = 3.9
    policy.discard(1)
    assert policy.victim() == 3
    policy.discard(3)
    policy.add(3)
    assert policy.victim() == 2
