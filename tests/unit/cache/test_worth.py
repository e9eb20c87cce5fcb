"""The worth of users against the sums that it stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.cache.policies.worth import RequestWorth

HALF_LIVES = (0.5, 4.0, 32.0)
SLOTS = 8

requests = st.lists(st.tuples(st.integers(0, 11), st.floats(0, 2)), max_size=40)
"""Who, and how long after the request before. Of 12 users in 8 slots, some share one."""


@given(requests=requests)
def test_the_order_is_that_of_the_decayed_sums(requests: list[tuple[int, float]]) -> None:
    worth = RequestWorth(HALF_LIVES, SLOTS)
    times: dict[int, list[float]] = {slot: [] for slot in range(SLOTS)}
    now = 0.0
    for user, later in requests:
        now += later
        worth.count(user, now)
        times[user % SLOTS].append(now)
    for which, half_life in enumerate(HALF_LIVES):
        sums = {slot: sum(2 ** ((time - now) / half_life) for time in noted) for slot, noted in times.items()}
        worths = {slot: worth.by(which)[worth.slot_of(slot)] for slot in range(SLOTS)}
        for slot, total in sums.items():
            for other, less in sums.items():
                if total > less * 1.001:  # Worths are single precision.
                    assert worths[slot] > worths[other]


def test_a_short_half_life_orders_by_the_last_request_and_a_long_one_by_their_number() -> None:
    worth = RequestWorth((0.25, 100.0), SLOTS)
    for time, user in enumerate([1, 1, 1, 2]):
        worth.count(user, float(time))
    recent, frequent = worth.by(0), worth.by(1)
    assert recent[2] > recent[1] > recent[3]
    assert frequent[1] > frequent[2] > frequent[3]


def test_worths_stay_comparable_after_a_million_turnovers() -> None:
    worth = RequestWorth((0.5,), SLOTS)
    worth.count(1, 1e6)
    worth.count(2, 1e6 + 0.5)
    assert worth.by(0)[2] == pytest.approx(worth.by(0)[1] + 1)


def test_the_order_outlives_the_zero_of_worths() -> None:
    """Users 1 and 2 come for a hundred thousand turnovers, 2 more often; 3 came once, and that is forgotten."""
    worth = RequestWorth(HALF_LIVES, SLOTS)
    worth.count(3, 0.0)
    for time in range(100_000):
        worth.count(1 if time % 3 == 0 else 2, float(time))
    for which in range(len(HALF_LIVES)):
        worths = worth.by(which)
        assert max(worths) < 5000
        assert worths[3] == worths[4] < worths[1]
    assert worth.by(2)[2] == pytest.approx(worth.by(2)[1] + 1, abs=0.1)  # Twice as often.


@pytest.mark.parametrize("slots", [-8, 0, 3, 12])
def test_slots_are_a_power_of_two(slots: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        RequestWorth(HALF_LIVES, slots)
