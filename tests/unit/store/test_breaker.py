from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from userkv.store.breaker import CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(failures=2, first_pause=0.5, max_pause=3.0, clock=clock)
    breaker.failure()
    breaker.failure()
    assert breaker.state == "open"
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    breaker = CircuitBreaker(failures=2, clock=Clock())
    for _ in range(3):
        breaker.failure()
        assert breaker.allow()
        breaker.success()
    assert (breaker.state, breaker.opened) == ("closed", 0)
    breaker.failure()
    breaker.failure()
    assert not breaker.allow()
    assert (breaker.state, breaker.opened) == ("open", 1)


def test_one_probe_when_the_pause_is_over() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 0.49
    assert not breaker.allow()
    clock.now = 0.5
    assert breaker.allow()
    assert breaker.state == "half_open"
    assert not breaker.allow()
    breaker.success()
    assert (breaker.state, breaker.opened) == ("closed", 1)
    assert breaker.allow()


def test_pauses_double_up_to_the_limit_and_start_again_after_a_success() -> None:
    clock = Clock()
    breaker = opened(clock)
    for pause in (0.5, 1.0, 2.0, 3.0, 3.0):
        clock.now += pause - 0.01
        assert not breaker.allow()
        clock.now += 0.02
        assert breaker.allow()
        breaker.failure()
        assert breaker.state == "open"
    breaker.success()
    breaker.failure()
    breaker.failure()
    assert breaker.opened == 2
    clock.now += 0.5
    assert breaker.allow()


def test_a_probe_that_never_reports_is_replaced_after_another_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 0.6
    assert breaker.allow()
    clock.now = 1.0
    assert not breaker.allow()
    clock.now = 1.1
    assert breaker.allow()
    assert not breaker.allow()


def test_calls_from_before_that_fail_late_do_not_lengthen_the_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 0.4
    breaker.failure()
    clock.now = 0.5
    assert breaker.allow()


def test_a_late_success_closes_it() -> None:
    breaker = opened(Clock())
    breaker.success()
    assert breaker.allow()


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5))))
def test_it_never_stays_open_for_longer_than_the_longest_pause(events: list[tuple[bool, float]]) -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures=2, first_pause=0.5, max_pause=3.0, clock=clock)
    for ok, pause in events:
        clock.now += pause
        if breaker.allow():
            (breaker.success if ok else breaker.failure)()
    clock.now += 3.0
    assert breaker.allow()


def test_of_many_threads_one_gets_the_probe() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 1.0
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: breaker.allow(), range(200))) == 1
