"""The RPC between scheduler and workers: calls, replies, time-outs and notices."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lookup_rpc import ENDPOINTS, EXTENTS, PATIENCE, Answer, Ends, echo, wait_until
from userkv.core.tokens import as_tokens
from userkv.engine.pool.wire import lookup_client
from userkv.engine.pool.wire.messages import (
    Call,
    CommitCall,
    CommitReply,
    ErrorReply,
    LocateCall,
    LookupCall,
    LookupReply,
    RegisterCall,
    RemoveCall,
    Reply,
    SaveNotice,
)
from userkv.records.record import Extent, UserRecord


@pytest.fixture(params=ENDPOINTS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    with ends.stack:
        yield ends


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    """An event to let answers wait for; set at the end, so that nothing hangs."""
    event = threading.Event()
    yield event
    event.set()


def test_every_kind_of_call_and_reply(ends: Ends) -> None:
    ends.serve()
    caller = ends.caller()
    assert caller.ask(0, LookupCall, "u@1 \N{SNOWMAN}", "m#1#f").record == "u@1 \N{SNOWMAN} m#1#f".encode()
    assert caller.ask(0, LocateCall, "u", "n", EXTENTS).tiers == (str(2**63 - 1), "7")
    assert caller.ask(0, RemoveCall, "u", "n", EXTENTS[1:]).tiers == ("7",)
    committed = caller.ask(0, CommitCall, "u", "n", b"\0\xff" * 10, 2**63 - 2)
    assert committed == CommitReply(committed.call_id, True, 2**63 - 1, EXTENTS, "20 bytes")


def test_large_records_both_ways(ends: Ends) -> None:
    record = UserRecord(1, as_tokens(range(60_000)), 16, (Extent(1, 0, 3750),), "w", 1.0)
    data = record.encode("u", "n")
    assert len(data) == 1 << 18

    def answer(call: Call) -> Reply:
        assert isinstance(call, CommitCall)
        return LookupReply(call.call_id, call.record, ())

    ends.serve(answer)
    caller = ends.caller()
    answers = [caller.call(0, CommitCall, "u", "n", data, 0) for _ in range(20)]
    assert all(UserRecord.decode(answer.wait().record, "u", "n") == record for answer in answers)


def test_a_quick_answer_overtakes_a_slow_one(ends: Ends, hold: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        if isinstance(call, LookupCall) and call.uid == "slow":
            hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller()
    slow = caller.call(0, LookupCall, "slow", "n")
    assert caller.ask(0, LookupCall, "quick", "n").record == b"quick n"
    assert slow.replies == []
    hold.set()
    assert slow.wait().record == b"slow n"


def test_calls_are_answered_by_several_threads_at_once(ends: Ends) -> None:
    together = threading.Barrier(3, timeout=PATIENCE)

    def answer(call: Call) -> Reply:
        if not isinstance(call, RegisterCall):
            together.wait()
        return echo(call)

    ends.serve(answer, threads=3)
    caller = ends.caller()
    answers = [caller.call(0, LookupCall, str(i), "n") for i in range(6)]
    assert [answer.wait().record for answer in answers] == [f"{i} n".encode() for i in range(6)]


def test_no_answer_in_time(ends: Ends, hold: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        if isinstance(call, LookupCall) and call.uid == "slow":
            hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller(timeout=0.3)
    start = time.monotonic()
    slow = [caller.call(0, LookupCall, "slow", "n") for _ in range(2)]
    quick = caller.call(0, LookupCall, "quick", "n")
    assert quick.wait().record == b"quick n"
    assert all(isinstance(answer.wait(), ErrorReply) for answer in slow)
    assert 0.3 <= time.monotonic() - start < 2
    hold.set()
    assert caller.ask(0, LookupCall, "later", "n").record == b"later n"
    assert [len(answer.replies) for answer in (*slow, quick)] == [1, 1, 1]


def test_patience(ends: Ends, hold: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that no request waits for, such as commits, may take longer; not for ever."""
    monkeypatch.setattr(lookup_client, "BACKGROUND_TIMEOUT_SECONDS", 0.6)

    def answer(call: Call) -> Reply:
        if isinstance(call, LookupCall) and call.uid == "slow":
            hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller(timeout=0.1)
    patient, hasty, first = Answer(), Answer(), Answer()
    start = time.monotonic()
    caller.client.call(0, LookupCall, patient, "slow", "n", background=True)
    caller.client.call(0, LookupCall, hasty, "slow", "n")
    caller.client.call(0, LookupCall, first, "quick", "n", background=True)
    assert first.wait().record == b"quick n"
    assert isinstance(hasty.wait(), ErrorReply)
    assert time.monotonic() - start < 0.5
    assert patient.replies == []
    assert isinstance(patient.wait(), ErrorReply)
    assert time.monotonic() - start >= 0.6
    caller.client.call(0, LookupCall, patient, "slow", "n", background=True)
    hold.set()
    wait_until(lambda: len(patient.replies) == 2)
    assert isinstance(patient.replies[1], LookupReply)


def test_nobody_there(ends: Ends) -> None:
    caller = ends.caller(timeout=0.2)
    start = time.monotonic()
    assert isinstance(caller.ask(0, LookupCall, "u", "n"), ErrorReply)
    assert 0.2 <= time.monotonic() - start < 2


def test_a_server_that_comes_later(ends: Ends) -> None:
    caller = ends.caller()
    early = caller.call(0, LookupCall, "u", "n")
    time.sleep(0.05)
    ends.serve()
    assert early.wait().record == b"u n"


def test_notices_wait_for_the_scheduler(ends: Ends) -> None:
    server = ends.serve()
    for job in range(3):
        server.notify(SaveNotice(job, job != 1))
    caller = ends.caller()
    wait_until(lambda: len(caller.notices) == 3)
    server.notify(SaveNotice(3, True))
    wait_until(lambda: len(caller.notices) == 4)
    assert caller.notices == [(0, SaveNotice(job, job != 1)) for job in range(4)]


def test_notices_go_to_the_last_scheduler(ends: Ends) -> None:
    server = ends.serve()
    first = ends.caller()
    assert first.ask(0, LookupCall, "u", "n").record == b"u n"
    second = ends.caller(timeout=0.2)
    # What it asks before it is known is answered to the first one.
    wait_until(lambda: isinstance(second.ask(0, LookupCall, "u", "n"), LookupReply))
    server.notify(SaveNotice(1, True))
    wait_until(lambda: second.notices)
    assert first.notices == []


def test_a_call_from_a_callback(ends: Ends) -> None:
    ends.serve()
    caller = ends.caller()
    second = Answer()
    caller.client.call(
        0, LookupCall, lambda reply: caller.client.call(0, LookupCall, second, "second", "n"), "first", "n"
    )
    assert second.wait().record == b"second n"


def test_nothing_is_left_behind(ends: Ends) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    server = ends.serve()
    caller = ends.caller()
    caller.ask(0, LookupCall, "u", "n")
    directory = Path(ends.endpoint.removeprefix("ipc://")).parent
    assert ends.kind == "tcp" or directory.is_dir()
    caller.client.close()
    server.close()
    assert ends.kind == "tcp" or not directory.exists()
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_many_threads_and_ranks(ends: Ends) -> None:
    def serve(rank: int) -> str:
        endpoint = ENDPOINTS[ends.kind]()
        ends.serve(lambda call: LookupReply(call.call_id, f"{rank} {getattr(call, 'uid', '')}".encode(), ()), endpoint)
        return endpoint

    caller = ends.caller(*(serve(rank) for rank in range(3)))
    assert caller.client.num_ranks == 3
    wrong: list[object] = []

    def work(thread: int) -> None:
        answers = {
            (rank, f"{thread}-{i}"): caller.call(rank, LookupCall, f"{thread}-{i}", "n")
            for i in range(100)
            for rank in range(3)
        }
        for (rank, uid), answer in answers.items():
            if answer.wait().record != f"{rank} {uid}".encode() or len(answer.replies) != 1:
                wrong.append((rank, uid, answer.replies))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
