"""A shadow against a plain model of the cache that it stands for."""

from hypothesis import given
from hypothesis import strategies as st

from userkv.cache.policies.shadow import Shadow
from userkv.cache.policies.worth import RequestWorth

USERS = 12


class PlainCache:
    """Sizes by user; whoever is worth the least loses what is too much."""

    def __init__(self, capacity: float, worth: RequestWorth) -> None:
        self.capacity = capacity
        self.worth = worth
        self.sizes: dict[int, float] = {}

    def request(self, user: int, size: float) -> float:
        held = self.sizes.pop(user, 0.0)
        if size:
            self.sizes[user] = size
        self.cut()
        return min(held, size)

    def cut(self) -> None:
        for user in sorted(self.sizes, key=lambda user: self.worth.by(0)[self.worth.slot_of(user)]):
            excess = sum(self.sizes.values()) - self.capacity
            if excess <= 0:
                return
            self.sizes[user] -= min(excess, self.sizes[user])
            if not self.sizes[user]:
                del self.sizes[user]


requests = st.lists(st.tuples(st.integers(0, USERS - 1), st.integers(0, 9)), max_size=80)


@given(capacity=st.integers(1, 30), half_life=st.sampled_from([1.0, 8.0]), requests=requests, data=st.data())
def test_hits_are_those_of_a_plain_cache(
    capacity: int, half_life: float, requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    worth = RequestWorth((half_life,), 16)
    shadow: Shadow[int] = Shadow(capacity, worth, 0)
    model = PlainCache(capacity, worth)
    halved_before = data.draw(st.sets(st.integers(0, max(0, len(requests) - 1)), max_size=2))
    watched = set(range(USERS))
    for time, (user, size) in enumerate(requests):
        if time in halved_before:
            watched = {user for user in watched if user % 2 == len(watched) % 2}
            shadow.halve(watched.__contains__)
            model.capacity /= 2
            model.sizes = {user: size for user, size in model.sizes.items() if user in watched}
            model.cut()
        if user not in watched:
            continue
        # At whole times no two users are worth the same, so there is one right victim.
        worth.count(user, float(time))
        assert shadow.count_request(user, size) == model.request(user, size)
        assert shadow._sizes == model.sizes
        assert len(shadow) == len(model.sizes)
        assert shadow._used == sum(model.sizes.values()) <= model.capacity


def test_what_is_larger_than_the_cache_is_held_in_part() -> None:
    worth = RequestWorth((1.0,), 16)
    shadow: Shadow[int] = Shadow(4, worth, 0)
    worth.count(1, 0.0)
    assert [shadow.count_request(1, 10), shadow.count_request(1, 10), shadow.count_request(1, 3)] == [0, 4, 3]


def test_users_without_a_history_take_no_place() -> None:
    """A user who sends two requests of no history was in the shadow twice, and his second eviction was an error."""
    worth = RequestWorth((1.0,), 16)
    shadow: Shadow[int] = Shadow(4, worth, 0)
    for user in range(8):
        assert shadow.count_request(user, 0) == shadow.count_request(user, 0) == 0
    assert len(shadow) == 0
    hits = []
    for time, user in enumerate([0, 1, 0, 1, 2]):
        worth.count(user, float(time))
        hits.append(shadow.count_request(user, 3))
    assert hits == [0, 0, 1, 1, 0]
    assert shadow.count_request(0, 0) == 0
    assert len(shadow) == 2
