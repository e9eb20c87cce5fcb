"""Whom the queue spares, against a list of those who wait."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.cache.waiting_users import WaitingUsers

steps = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "arrive", "leave"]), st.integers(0, 14), st.sampled_from("abc")),
    max_size=80,
)


class Table:
    """How often each user is spared."""

    def __init__(self) -> None:
        self.spared: Counter[str] = Counter()

    def acquire(self, user: str) -> None:
        self.spared[user] += 1

    def release(self, user: str) -> None:
        assert self.spared[user] > 0, "nobody had spared him"
        self.spared[user] -= 1


@pytest.mark.parametrize("limit", [1, 3, 64])
@given(steps=steps)
def test_the_first_who_have_not_left_are_spared(limit: int, steps: list[tuple[str, int, str]]) -> None:
    table = Table()
    waiting: WaitingUsers[str] = WaitingUsers(table, limit)
    queue: dict[str, str] = {}
    for action, number, user in steps:
        request_id = f"r{number}"
        if action == "arrive":
            waiting.arrive(request_id, user)
            queue.setdefault(request_id, user)
        else:
            waiting.leave(request_id)
            queue.pop(request_id, None)
        first = list(queue.values())[:limit]
        assert waiting.spared() == first
        assert +table.spared == Counter(first)


def test_a_user_whose_next_request_moves_up_is_spared_all_the_time() -> None:
    """Else he would be idle for a moment, and count as one who has just been used."""

    class Strict(Table):
        def release(self, user: str) -> None:
            super().release(user)
            assert self.spared[user] > 0

    waiting: WaitingUsers[str] = WaitingUsers(Strict(), limit=1)
    waiting.arrive("1", "a")
    waiting.arrive("2", "a")
    waiting.leave("1")
    assert waiting.spared() == ["a"]
