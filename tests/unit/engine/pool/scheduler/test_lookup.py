"""One request's look-up: questions, answers that come late or for an earlier question, and what voids them."""

import pytest

from tests.support.fake_pool_client import FakePoolClient
from tests.support.records import BLOCK, answer_of, record_of
from userkv.core.errors import IntegrityError
from userkv.core.tokens import as_tokens
from userkv.engine.pool.scheduler.lookup import ANSWER_SECONDS, PoolLookup
from userkv.engine.pool.scheduler.lookup_state import LookupState
from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, NOT_IN_POOL

HISTORY = list(range(22))


class Bench:
    def __init__(self) -> None:
        self.pool = FakePoolClient()
        self.lookup = PoolLookup()

    def ask(self, now: float = 1.0) -> None:
        self.lookup.ask(self.pool, ("u", "n"), as_tokens(HISTORY), BLOCK, now)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_answer_is_compared_with_the_history(bench: Bench) -> None:
    bench.ask()
    assert bench.lookup.answer is None
    assert bench.lookup.state is LookupState.ASKED
    bench.pool.lookups[0].answer(answer_of(record_of([*HISTORY[:9], 99])))
    answer = bench.lookup.answer
    assert answer is not None
    assert answer.common == 9
    assert [wanted for read in answer.reads for wanted in read.wanted] == [0, 1, 2]
    assert bench.lookup.state is LookupState.ANSWERED


@pytest.mark.parametrize("result", [NOT_IN_POOL, LOOKUP_FAILED])
def test_an_answer_without_a_record_has_nothing_to_load(bench: Bench, result: object) -> None:
    bench.ask()
    bench.pool.lookups[0].answer(result)  # type: ignore[arg-type]
    answer = bench.lookup.answer
    assert answer is not None
    assert (answer.result, answer.common, answer.reads) == (result, 0, ())


def test_a_late_answer_to_an_earlier_question_does_not_count(bench: Bench) -> None:
    """Also where both questions were asked at the same time of a coarse clock."""
    bench.ask(now=1.0)
    bench.pool.lookups[0].answer(NOT_IN_POOL)
    assert bench.lookup.answer is not None
    bench.ask(now=1.0)
    bench.pool.lookups[0].answer(answer_of(record_of(HISTORY)))
    assert bench.lookup.answer is None
    bench.pool.lookups[1].answer(answer_of(record_of(HISTORY)))
    assert bench.lookup.answer is not None


def test_only_the_first_question_of_a_request_counts_as_a_use(bench: Bench) -> None:
    for _ in range(3):
        bench.ask()
        bench.pool.lookups[-1].answer(NOT_IN_POOL)
        assert bench.lookup.answer is not None
    assert [lookup.is_new_request for lookup in bench.pool.lookups] == [True, False, False]


def test_when_the_pool_must_be_asked(bench: Bench) -> None:
    assert bench.lookup.must_ask(0.0)
    bench.ask(now=1.0)
    assert not bench.lookup.must_ask(1000.0), "an open question has a time-out of its own"
    bench.pool.lookups[-1].answer(NOT_IN_POOL)
    assert not bench.lookup.must_ask(1.0 + ANSWER_SECONDS)
    assert bench.lookup.must_ask(1.1 + ANSWER_SECONDS)
    bench.ask(now=10.0)
    bench.pool.lookups[-1].answer(NOT_IN_POOL)
    assert not bench.lookup.must_ask(1000.0), "an old answer is asked for again once only"


@pytest.mark.parametrize("answered", ["before", "after", "never"])
def test_what_the_pool_said_of_other_weights_is_void(bench: Bench, answered: str) -> None:
    bench.ask()
    if answered == "before":
        bench.pool.lookups[0].answer(answer_of(record_of(HISTORY)))
        assert bench.lookup.answer is not None
    bench.lookup.void()
    if answered == "after":
        bench.pool.lookups[0].answer(answer_of(record_of(HISTORY)))
    assert bench.lookup.answer is None
    assert bench.lookup.must_ask(1.0)
    assert bench.lookup.state is LookupState.NOT_ASKED


@pytest.mark.parametrize("ok", [True, False])
def test_a_request_loads_once(bench: Bench, ok: bool) -> None:
    bench.ask()
    with pytest.raises(IntegrityError):
        bench.lookup.start_load()
    bench.pool.lookups[0].answer(answer_of(record_of(HISTORY)))
    assert bench.lookup.answer is not None
    bench.lookup.start_load()
    bench.lookup.end_load(ok)
    assert bench.lookup.state is (LookupState.LOADED if ok else LookupState.LOAD_FAILED)
    with pytest.raises(IntegrityError):
        bench.ask()


def test_new_weights_during_a_load_void_the_answer_and_let_the_load_end(bench: Bench) -> None:
    bench.ask()
    bench.pool.lookups[0].answer(answer_of(record_of(HISTORY)))
    assert bench.lookup.answer is not None
    bench.lookup.start_load()
    bench.lookup.void()
    assert bench.lookup.answer is None
    bench.lookup.end_load(True)
    assert bench.lookup.state is LookupState.LOADED
