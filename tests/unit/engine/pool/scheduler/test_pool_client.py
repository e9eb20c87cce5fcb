"""One answer from all ranks, over real sockets: KV counts only as far as every rank has its part of it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lookup_rpc import PATIENCE, ipc_endpoint, wait_until
from tests.support.records import BLOCK, record_of
from userkv.core.tokens import as_tokens
from userkv.engine.pool.scheduler.pool_client import (
    LOOKUP_FAILED,
    NOT_IN_POOL,
    PoolClient,
    PoolCommitResult,
    PoolLookupResult,
)
from userkv.engine.pool.wire.lookup_client import MooncakeLookupClient
from userkv.engine.pool.wire.lookup_server import MooncakeLookupServer
from userkv.engine.pool.wire.messages import (
    Call,
    CommitCall,
    CommitReply,
    ErrorReply,
    LocateCall,
    LocateReply,
    LookupCall,
    LookupReply,
    RegisterCall,
    RemoveCall,
    Reply,
    extents_to_wire,
)
from userkv.records.load_plan import usable_part
from userkv.records.record import Extent, UserRecord
from userkv.store.backend import Tier

RECORD = record_of(range(22))
"""Six blocks, in three extents."""

DATA = RECORD.encode("u", "n")


class Rank:
    """A worker that answers as it is told to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.record = DATA
        self.tiers: tuple[str, ...] = ("dram",) * 3
        self.instead: Callable[[Call], Reply] | None = None

    def answer(self, call: Call) -> Reply:
        self.calls.append(call)
        if self.instead is not None and not isinstance(call, RegisterCall):
            return self.instead(call)
        match call:
            case LookupCall():
                return LookupReply(call.call_id, self.record, self.tiers)
            case LocateCall():
                return LocateReply(call.call_id, self.tiers)
            case CommitCall():
                return CommitReply(
                    call.call_id, True, call.base_generation + 1, extents_to_wire(RECORD.extents[:1]), ""
                )
            case _:
                return LocateReply(call.call_id)


class Bench:
    """Three ranks and the scheduler's view of them."""

    def __init__(self, stack: ExitStack, ranks: int = 3, timeout: float = 5.0) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        endpoints = []
        for rank in self.ranks:
            server = MooncakeLookupServer(ipc_endpoint(), rank.answer)
            stack.callback(server.close)
            endpoints.append(server.endpoint)
        client = MooncakeLookupClient(endpoints, timeout)
        client.start(lambda rank, notice: None)
        self.pool = PoolClient(client)
        stack.callback(self.pool.close)

    def lookup(self, uid: str = "u", namespace: str = "n") -> PoolLookupResult:
        answers: list[PoolLookupResult] = []
        self.pool.lookup(uid, namespace, answers.append)
        wait_until(lambda: answers)
        return answers[0]

    def commit(self, base_generation: int = 3) -> PoolCommitResult:
        answers: list[PoolCommitResult] = []
        self.pool.commit("u", "n", RECORD, base_generation, answers.append)
        wait_until(lambda: answers)
        return answers[0]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, *getattr(request, "param", ()))


def test_all_ranks_have_everything(bench: Bench) -> None:
    assert bench.lookup() == PoolLookupResult(True, RECORD, RECORD, Tier.DRAM)
    assert isinstance(bench.ranks[0].calls[-1], LookupCall)
    for rank in bench.ranks[1:]:
        call = rank.calls[-1]
        assert isinstance(call, LocateCall)
        assert (call.uid, call.namespace, call.extents) == ("u", "n", extents_to_wire(RECORD.extents))


@pytest.mark.parametrize("bench", [(1,)], indirect=True)
def test_a_single_rank(bench: Bench) -> None:
    assert bench.lookup() == PoolLookupResult(True, RECORD, RECORD, Tier.DRAM)
    bench.ranks[0].tiers = ("ssd", "", "dram")
    assert bench.lookup() == PoolLookupResult(True, RECORD, usable_part(RECORD, [True, False, True]), Tier.SSD)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("missing", range(3))
def test_one_rank_lacks_an_extent(bench: Bench, rank: int, missing: int) -> None:
    bench.ranks[rank].tiers = tuple("" if extent == missing else "dram" for extent in range(3))
    answer = bench.lookup()
    assert answer.succeeded
    assert answer.record == RECORD
    if missing == 0:
        assert (answer.usable, answer.tier) == (None, None)
    else:
        assert answer.usable is not None
        assert len(answer.usable.tokens) == 2 * BLOCK * missing
        assert answer.usable.extents == RECORD.extents[:missing]


def test_ranks_that_lack_different_extents(bench: Bench) -> None:
    bench.ranks[1].tiers, bench.ranks[2].tiers = ("dram", "dram", ""), ("dram", "", "ssd")
    answer = bench.lookup()
    assert answer.usable is not None
    assert answer.usable.extents == RECORD.extents[:1]


@pytest.mark.parametrize("rank", range(3))
def test_the_slowest_tier_counts(bench: Bench, rank: int) -> None:
    bench.ranks[rank].tiers = ("dram", "ssd", "dram")
    assert bench.lookup().tier is Tier.SSD


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_cannot_answer(bench: Bench, rank: int) -> None:
    bench.ranks[rank].instead = lambda call: ErrorReply(call.call_id, "the pool is down")
    assert bench.lookup() == LOOKUP_FAILED


@pytest.mark.parametrize("bench", [(3, 0.2)], indirect=True)
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_does_not_answer(bench: Bench, rank: int) -> None:
    released = threading.Event()
    bench.ranks[rank].instead = lambda call: ErrorReply(call.call_id, str(released.wait(PATIENCE)))
    start = time.monotonic()
    assert bench.lookup() == LOOKUP_FAILED
    assert time.monotonic() - start < 2
    bench.ranks[rank].instead = None
    released.set()
    assert bench.lookup().usable == RECORD


def test_nobody_is_known(bench: Bench) -> None:
    bench.ranks[0].record, bench.ranks[0].tiers = b"", ()
    assert bench.lookup() == NOT_IN_POOL
    assert not any(isinstance(call, LocateCall) for rank in bench.ranks for call in rank.calls)


def test_a_tombstone_is_an_answer_of_its_own(bench: Bench) -> None:
    tombstone = UserRecord.tombstone(7, "w", 1.0)
    bench.ranks[0].record, bench.ranks[0].tiers = tombstone.encode("u", "n"), ()
    assert bench.lookup() == PoolLookupResult(True, tombstone)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        DATA[:-1000],
        DATA[:40] + bytes(len(DATA) - 40),
        RECORD.encode("v", "n"),
        RECORD.encode("u", "m"),
        b"UKVR" + b"\xff" * 2000,
    ],
    ids=["nothing", "short", "torn", "of another user", "of another namespace", "hostile"],
)
def test_records_that_cannot_be_believed_are_none(bench: Bench, data: bytes) -> None:
    bench.ranks[0].record = data
    assert bench.lookup() == NOT_IN_POOL
    bench.ranks[0].record = DATA
    assert bench.lookup().usable == RECORD


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("tiers", [(), ("dram",), ("dram",) * 4], ids=len)
def test_a_rank_that_answers_something_else_than_was_asked(bench: Bench, rank: int, tiers: tuple[str, ...]) -> None:
    bench.ranks[rank].tiers = tiers
    assert bench.lookup() == LOOKUP_FAILED
    bench.ranks[rank].instead = lambda call: CommitReply(call.call_id, True, 1, (), "")
    assert bench.lookup() == LOOKUP_FAILED


def test_hundreds_of_lookups_at_once(bench: Bench) -> None:
    answers: list[PoolLookupResult] = []
    for _ in range(300):
        bench.pool.lookup("u", "n", answers.append)
    wait_until(lambda: len(answers) == 300)
    assert all(answer.usable == RECORD for answer in answers)


def test_the_first_rank_commits(bench: Bench) -> None:
    assert bench.commit(base_generation=41) == PoolCommitResult(True, False, RECORD.extents[:1])
    call = bench.ranks[0].calls[-1]
    assert isinstance(call, CommitCall)
    assert call.base_generation == 41
    assert UserRecord.decode(call.record, "u", "n") == RECORD
    assert not any(isinstance(call, CommitCall) for rank in bench.ranks[1:] for call in rank.calls)


def test_refused_and_unknown_are_different(bench: Bench) -> None:
    bench.ranks[0].instead = lambda call: CommitReply(call.call_id, False, 1, (), "deleted")
    assert bench.commit() == PoolCommitResult(False, True)
    bench.ranks[0].instead = lambda call: ErrorReply(call.call_id, "who knows")
    assert bench.commit() == PoolCommitResult(False, False)


def test_all_ranks_remove(bench: Bench) -> None:
    bench.pool.remove("u", "n", RECORD.extents[1:])
    wait_until(lambda: all(any(isinstance(call, RemoveCall) for call in rank.calls) for rank in bench.ranks))
    for rank in bench.ranks:
        call = rank.calls[-1]
        assert isinstance(call, RemoveCall)
        assert (call.uid, call.namespace, call.extents) == ("u", "n", extents_to_wire(RECORD.extents[1:]))
    before = [len(rank.calls) for rank in bench.ranks]
    bench.pool.remove("u", "n", ())
    assert bench.lookup().succeeded
    assert not any(
        isinstance(call, RemoveCall)
        for rank, seen in zip(bench.ranks, before, strict=True)
        for call in rank.calls[seen:]
    )


def test_closing_answers_open_lookups(bench: Bench) -> None:
    released = threading.Event()
    for rank in bench.ranks[1:]:
        rank.instead = lambda call: ErrorReply(call.call_id, str(released.wait(PATIENCE)))
    answers: list[PoolLookupResult] = []
    bench.pool.lookup("u", "n", answers.append)
    wait_until(lambda: all(len(rank.calls) > 0 for rank in bench.ranks))
    bench.pool.close()
    released.set()
    assert answers == [LOOKUP_FAILED]


@given(st.data())
def test_what_all_ranks_have_is_what_is_usable(data: st.DataObject) -> None:
    """The votes, put together by hand."""
    starts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    extents = [Extent(i, min(start, i), 6 - min(start, i)) for i, start in enumerate([0, *starts])]
    record = UserRecord(1, as_tokens(range(24)), BLOCK, tuple(extents), "w", 1.0)
    vote = st.lists(st.sampled_from(["", "dram", "ssd"]), min_size=len(extents), max_size=len(extents))
    votes = [tuple(tiers) for tiers in data.draw(st.lists(vote, min_size=1, max_size=3))]
    answers: list[PoolLookupResult] = []
    PoolClient(Votes(record, votes)).lookup("u", "n", answers.append)  # type: ignore[arg-type]
    present = [all(tiers[i] for tiers in votes) for i in range(len(extents))]
    usable = usable_part(record, present)
    assert answers[0].usable == usable
    assert (answers[0].tier is None) == (usable is None)
    if usable is not None:
        kept = [record.extents.index(extent) for extent in usable.extents]
        if any(tiers[i] == "ssd" for tiers in votes for i in kept):
            assert answers[0].tier is Tier.SSD
        if not any("ssd" in tiers for tiers in votes):
            assert answers[0].tier is Tier.DRAM


class Votes:
    """In place of the client: ranks that have voted."""

    def __init__(self, record: UserRecord, votes: list[tuple[str, ...]]) -> None:
        self.num_ranks = len(votes)
        self._record, self._votes = record, votes

    def call(
        self, rank: int, kind: type[Call], callback: Callable[[Reply], None], *fields: object, background: bool = False
    ) -> None:
        data = self._record.encode("u", "n")
        callback(LookupReply(1, data, self._votes[0]) if kind is LookupCall else LocateReply(1, self._votes[rank]))
