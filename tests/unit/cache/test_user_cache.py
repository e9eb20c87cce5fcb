"""Decisions of the user cache that need no engine: what is kept, who is counted, who waits."""

import pytest

from tests.support.fake_block_pool import FakeBlockPool
from userkv.cache.cache_request import CacheRequest
from userkv.cache.settings import CacheSettings
from userkv.cache.user_cache import UserCache
from userkv.core.errors import IntegrityError
from userkv.core.request import UserKey, UserRequest
from userkv.core.tokens import as_tokens

BLOCK = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A cache on a fake pool, and a way to run requests in one call."""

    def __init__(self, num_blocks: int = 50, **settings: object) -> None:
        self.pool = FakeBlockPool(num_blocks)
        self.clock = Clock()
        self.cache = UserCache(BLOCK, num_blocks, self.pool, CacheSettings(**settings), clock=self.clock)  # type: ignore[arg-type]

    def lookup(self, history: list[int], user: str = "u", **switches: bool) -> CacheRequest:
        return CacheRequest(UserKey(user), UserRequest(user, len(history), **switches), as_tokens(history))

    def run(self, name: str, lookup: CacheRequest, computed: int | None = None, loaded: int = 0) -> int:
        """From look-up to end; returns the hit. ``computed``: tokens computed when it ends (default: all, and more)."""
        hit = self.cache.find_hit(name, lookup, len(lookup.history) + 1)
        shared = list(hit.blocks[: hit.num_tokens // BLOCK])
        self.pool.touch(shared)
        blocks = shared + self.pool.take(-(-(len(lookup.history) + 1) // BLOCK) - len(shared))
        self.cache.start(name, lookup, hit.num_tokens, hit.num_tokens + loaded)
        self.cache.finish(name, len(lookup.history) + 1 if computed is None else computed, blocks)
        self.pool.free_blocks(blocks)
        self.cache.check_integrity()
        return hit.num_tokens

    def held(self, user: str = "u") -> list[int]:
        entry = self.cache.table.get(UserKey(user))
        return [] if entry is None else entry.tokens.tolist()


def test_counts_follow_the_requests_that_start() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3, 4, 5]))
    bench.run("2", bench.lookup([1, 2, 3, 4, 5, 6]))
    bench.run("3", bench.lookup([]))
    bench.cache.find_hit("never starts", bench.lookup([1, 2]), 3)
    bench.cache.finish("never starts", 0, [])
    counts = bench.cache.stats.take()
    assert counts["user_hits"] == 1
    assert counts["user_misses"] == 1
    assert counts["hit_tokens"] == 5
    assert counts["history_tokens"] == 11
    assert bench.cache.stats.take() == dict.fromkeys(counts, 0)


def test_a_request_that_starts_again_counts_once() -> None:
    """It was preempted, or what it wanted to load failed, so that it computes what it has counted before."""
    bench = Bench()
    lookup = bench.lookup([1, 2, 3, 4, 5, 6])
    bench.run("1", lookup, computed=0, loaded=6)
    bench.run("1", lookup, computed=4)
    assert bench.run("1", lookup) == 4
    counts = bench.cache.stats.take()
    assert (counts["history_tokens"], counts["hit_tokens"]) == (6, 0)
    assert (counts["user_hits"], counts["user_misses"]) == (0, 1)
    bench.run("2", bench.lookup([1, 2, 3, 4, 5, 6]))
    assert bench.cache.stats.take()["hit_tokens"] == 6


def test_read_and_write_switches() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3], write=False))
    assert bench.held() == []
    bench.run("2", bench.lookup([1, 2, 3]))
    assert bench.run("3", bench.lookup([1, 2, 3, 4], read=False)) == 0
    assert bench.held() == [1, 2, 3, 4]


def test_a_shorter_history_does_not_displace_the_longer_one_it_begins() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3, 4, 5, 6]))
    assert bench.run("2", bench.lookup([1, 2, 3])) == 3
    assert bench.held() == [1, 2, 3, 4, 5, 6]


def test_a_changed_history_replaces_the_old_one() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3, 4, 5, 6]))
    assert bench.run("2", bench.lookup([1, 2, 9])) == 2
    assert bench.held() == [1, 2, 9]


@pytest.mark.parametrize(("computed", "kept"), [(6, [1, 2, 3, 4, 5, 6]), (5, [1, 2, 3, 4, 5]), (1, [1]), (0, [])])
def test_what_was_computed_of_an_unfinished_history_is_kept(computed: int, kept: list[int]) -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3, 4, 5, 6]), computed=computed)
    assert bench.held() == kept


def test_an_unfinished_other_history_does_not_displace_a_longer_one() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3, 4, 5, 6]))
    bench.run("2", bench.lookup([9] * 8), computed=4)
    assert bench.held() == [1, 2, 3, 4, 5, 6]
    bench.run("3", bench.lookup([9] * 8), computed=7)
    assert bench.held() == [9] * 7


def test_tokens_that_a_connector_has_yet_to_load_are_not_kept() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3, 4, 5, 6]), computed=4, loaded=4)
    assert bench.held() == []


def test_the_number_of_users_is_limited() -> None:
    bench = Bench(max_users=2)
    for user in "abc":
        bench.run(user, bench.lookup([1, 2, 3], user))
    assert [bench.held(user) for user in "abc"] == [[], [1, 2, 3], [1, 2, 3]]
    assert bench.cache.stats.lru_evictions == 1
    unlimited = Bench(max_users=2, lru=False)
    for user in "abc":
        unlimited.run(user, unlimited.lookup([1, 2, 3], user))
    assert len(unlimited.cache.table) == 3


def test_nobody_is_evicted_in_vain() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3], "a"))
    assert not bench.cache.make_room(5)
    assert bench.held("a") == [1, 2, 3]
    assert bench.cache.make_room(1)
    assert bench.held("a") == []


def test_the_user_who_asks_is_spared_while_others_can_go() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3], "a"))
    bench.run("2", bench.lookup([1, 2, 3], "b"))
    again = bench.lookup([1, 2, 3, 4], "a")
    bench.cache.find_hit("3", again, 5)
    assert bench.cache.make_room(1, "3", again)
    assert bench.held("a") == [1, 2, 3]
    assert bench.held("b") == []
    assert not bench.cache.make_room(1, "3", again)
    assert bench.held("a") == [1, 2, 3]


def test_reset_forgets_users_and_what_runs_is_not_kept() -> None:
    bench = Bench()
    bench.run("1", bench.lookup([1, 2, 3], "a"))
    running = bench.lookup([5, 6, 7], "b")
    bench.cache.find_hit("2", running, 4)
    bench.cache.start("2", running, 0, 0)
    bench.cache.reset()
    bench.cache.check_integrity()
    blocks = bench.pool.take(1)
    bench.cache.finish("2", 4, blocks)
    bench.pool.free_blocks(blocks)
    assert len(bench.cache.table) == 0
    assert bench.pool.num_free == 50


class TestSingleFlight:
    """A leader that computes [0..9], and others that come meanwhile."""

    HISTORY = tuple(range(10))

    def leader(self, bench: Bench) -> CacheRequest:
        lookup = bench.lookup([*self.HISTORY])
        bench.cache.find_hit("leader", lookup, 11)
        bench.cache.start("leader", lookup, 0, 0)
        return lookup

    def test_waits_until_the_leader_has_computed_it(self) -> None:
        bench = Bench()
        lookup = self.leader(bench)
        assert bench.cache.must_wait("waiter", lookup)
        blocks = bench.pool.take(3)
        bench.cache.keep_history("leader", 9, blocks)
        assert bench.cache.must_wait("waiter", lookup)
        bench.cache.keep_history("leader", 10, blocks)
        assert not bench.cache.must_wait("waiter", lookup)
        assert bench.cache.find_hit("waiter", lookup, 11).num_tokens == 10
        assert bench.cache.stats.single_flight_waits == 1

    def test_nobody_waits_for_a_leader_that_is_gone(self) -> None:
        bench = Bench()
        lookup = self.leader(bench)
        assert bench.cache.must_wait("waiter", lookup)
        bench.cache.finish("leader", 4, bench.pool.take(1))
        assert not bench.cache.must_wait("waiter", lookup)
        assert bench.cache.find_hit("waiter", lookup, 11).num_tokens == 4

    def test_gives_up_after_the_limit_and_does_not_wait_again(self) -> None:
        bench = Bench(single_flight_seconds=2.0)
        lookup = self.leader(bench)
        assert bench.cache.must_wait("waiter", lookup)
        bench.clock.now = 2.1
        assert not bench.cache.must_wait("waiter", lookup)
        assert not bench.cache.must_wait("waiter", lookup)
        assert bench.cache.stats.single_flight_timeouts == 1

    @pytest.mark.parametrize(
        ("history", "switches"),
        [
            ([9, 9, 9, 9, 9], {}),
            ([0, 1, 2], {}),
            (list(range(10)), {"read": False}),
            ([0, 1, 2, 3, 9, 9, 9, 9], {}),  # 4 of the 10 tokens that the leader computes
        ],
    )
    def test_nobody_waits_for_what_does_not_help(self, history: list[int], switches: dict[str, bool]) -> None:
        bench = Bench()
        self.leader(bench)
        assert not bench.cache.must_wait("waiter", bench.lookup(history, **switches))
        assert bench.cache.stats.single_flight_waits == 0

    def test_other_users_do_not_wait(self) -> None:
        bench = Bench()
        self.leader(bench)
        assert not bench.cache.must_wait("waiter", bench.lookup([*self.HISTORY], "other"))

    def test_can_be_turned_off(self) -> None:
        bench = Bench(single_flight_seconds=0.0)
        assert not bench.cache.must_wait("waiter", self.leader(bench))


def test_check_integrity_finds_a_wrong_count_of_running_requests() -> None:
    bench = Bench()
    lookup = bench.lookup([1, 2])
    bench.cache.start("1", lookup, 0, 0)
    bench.cache.check_integrity()
    bench.cache.table.release(lookup.key)
    with pytest.raises(IntegrityError):
        bench.cache.check_integrity()
