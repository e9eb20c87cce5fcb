"""The contract of :class:`EvictionPolicy`, for every policy there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.policies import POLICIES, make_policy
from userkv.core.policies.lru import UserKVLRUManager
from userkv.core.policies.policy import EvictionPolicy

steps = st.lists(st.tuples(st.sampled_from(["add", "discard", "evict", "request"]), st.integers(0, 6)), max_size=60)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=steps)
def test_victims_are_exactly_the_users_that_may_go(name: str, steps: list[tuple[str, int]]) -> None:
    policy: EvictionPolicy[int] = make_policy(name, 10)
    held: set[int] = set()
    for action, user in steps:
        if action == "add" and user not in held:
            policy.add(user)
            held.add(user)
        elif action == "discard":
            policy.discard(user)
            held.discard(user)
        elif action == "request":
            policy.note_request(user, 1 + user)
        elif action == "evict":
            victim = policy.victim()
            assert policy.victim() == victim
            assert (victim is None) == (not held)
            if victim is not None:
                assert victim in held
                policy.discard(victim)
                held.remove(victim)
        assert len(policy) == len(held)
        assert all((user in policy) == (user in held) for user in range(7))
    policy.clear()
    assert policy.victim() is None


@pytest.mark.parametrize("name", POLICIES)
def test_a_user_is_added_once(name: str) -> None:
    policy: EvictionPolicy[int] = make_policy(name, 10)
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
            policy.note_request(user, 1)  # Only the end of a request counts.
        else:
            policy.discard(user)
            order = [other for other in order if other != user]
            if action == "add":
                policy.add(user)
                order.append(user)
