"""The set of idle users against a set."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.cache.policies.idle_users import FEW, IdleUsers
from userkv.cache.policies.worth import RequestWorth

CROWD = 100

steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "discard", "evict", "fill", "empty", "clear"]), st.integers(0, CROWD - 1)),
    max_size=60,
)


@given(order=st.permutations(range(CROWD)), steps=steps)
def test_equals_a_set_and_finds_its_least_worthy_member(order: list[int], steps: list[tuple[str, int]]) -> None:
    worth = RequestWorth((1.0,), 128)
    for time, user in enumerate(order):
        worth.count(user, float(time))
    rank = {user: place for place, user in enumerate(order)}
    users: IdleUsers[int] = IdleUsers(worth)
    model: set[int] = set()
    for action, user in steps:
        if action == "add" and user not in model:
            users.add(user)
            model.add(user)
        elif action == "discard":
            users.discard(user)
            model.discard(user)
        elif action == "evict" and model:
            victim = users.least(0)
            assert victim is not None
            users.discard(victim)
            model.remove(victim)
        elif action == "fill":
            for other in sorted(set(range(user)) - model):
                users.add(other)
                model.add(other)
        elif action == "empty":
            for other in range(user, CROWD):
                users.discard(other)
                model.discard(other)
        elif action == "clear":
            users.clear()
            model.clear()
        assert len(users) == len(model)
        assert all((user in users) == (user in model) for user in range(CROWD))
        least = users.least(0)
        if len(model) <= FEW:
            assert least == min(model, key=rank.__getitem__, default=None)
        else:
            assert least in model


def test_of_many_one_among_the_least_worthy_is_found() -> None:
    worth = RequestWorth((1.0,), 1024)
    users: IdleUsers[int] = IdleUsers(worth, seed=1)
    for user in range(1000):
        worth.count(user, user / 10)
    for user in Random(0).sample(range(1000), 1000):
        users.add(user)
    found = [users.least(0) for _ in range(300)]
    assert all(user is not None and user in users for user in found)
    # The least of 12 has 1000 / 13 below it on average; a member at random would have 500.
    assert sum(user or 0 for user in found) / len(found) == pytest.approx(1000 / 13, rel=0.2)
    assert len(set(found)) > 50


def test_equal_seeds_find_equal_users() -> None:
    def found(seed: int) -> list[int | None]:
        worth = RequestWorth((1.0,), 1024)
        users: IdleUsers[int] = IdleUsers(worth, seed)
        for user in range(500):
            worth.count(user, float(user))
            users.add(user)
        return [users.least(0) for _ in range(20)]

    assert found(3) == found(3) != found(4)
