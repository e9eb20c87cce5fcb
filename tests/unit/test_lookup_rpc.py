"""The RPC between scheduler and workers: every call ends with one reply, whatever the other end does."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.rpc import PATIENCE, Answer, Caller, ipc_endpoint, tcp_endpoint, wait_until
from userkv.core.errors import InvalidSettingError
from userkv.core.record import Extent, UserRecord
from userkv.core.tokens import as_tokens
from userkv.engine.pool import lookup_rpc
from userkv.engine.pool.lookup_rpc import MooncakeLookupClient, MooncakeLookupServer
from userkv.engine.pool.messages import (
    Call,
    Commit,
    Committed,
    Failed,
    Found,
    Hello,
    Locate,
    Located,
    Lookup,
    Remove,
    Reply,
    Saved,
)

ENDPOINTS = {"ipc": ipc_endpoint, "tcp": tcp_endpoint}
EXTENTS = ((2**63 - 1, 0, 3), (7, 3, 1))
GARBAGE = [
    b"",
    b"\xc1",
    b"\x93",
    b"hello",
    msgspec.msgpack.encode(["Lookup"]),
    msgspec.msgpack.encode(["Lookup", "1", "u", "n"]),
    msgspec.msgpack.encode(["Delete", 1, "u", "n"]),
    msgspec.msgpack.encode({"type": "Lookup"}),
    msgspec.msgpack.encode(["Locate", 1, "u", "n", [[1, 2]]]),
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 100_000,
]


def echo(call: Call) -> Reply:
    """A reply of the right kind that shows what was asked."""
    match call:
        case Lookup():
            return Found(call.call_id, f"{call.uid} {call.namespace}".encode(), ("dram", ""))
        case Commit():
            return Committed(call.call_id, True, call.base_generation + 1, EXTENTS, f"{len(call.record)} bytes")
        case Locate() | Remove():
            return Located(call.call_id, tuple(str(extent[0]) for extent in call.extents))
        case _:
            return Located(call.call_id)


class Ends:
    """Servers and callers on one kind of endpoint, closed at the end."""

    def __init__(self, kind: str) -> None:
        self.endpoint = ENDPOINTS[kind]()
        self.kind = kind
        self.stack = ExitStack()

    def serve(
        self, answer: Callable[[Call], Reply] = echo, endpoint: str | None = None, threads: int = 4
    ) -> MooncakeLookupServer:
        server = MooncakeLookupServer(endpoint or self.endpoint, answer, threads)
        self.stack.callback(server.close)
        return server

    def caller(self, *endpoints: str, timeout: float = 5.0) -> Caller:
        caller = Caller(*(endpoints or (self.endpoint,)), timeout=timeout)
        self.stack.callback(caller.client.close)
        return caller

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """A stranger's socket, connected to the endpoint."""
        context = zmq.Context()
        socket = context.socket(kind)
        socket.linger = 100
        self.stack.callback(context.term)
        self.stack.callback(socket.close)
        socket.connect(self.endpoint)
        return socket


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
    assert caller.ask(0, Lookup, "u@1 \N{SNOWMAN}", "m#1#f").record == "u@1 \N{SNOWMAN} m#1#f".encode()
    assert caller.ask(0, Locate, "u", "n", EXTENTS).tiers == (str(2**63 - 1), "7")
    assert caller.ask(0, Remove, "u", "n", EXTENTS[1:]).tiers == ("7",)
    committed = caller.ask(0, Commit, "u", "n", b"\0\xff" * 10, 2**63 - 2)
    assert committed == Committed(committed.call_id, True, 2**63 - 1, EXTENTS, "20 bytes")


def test_large_records_both_ways(ends: Ends) -> None:
    record = UserRecord(1, as_tokens(range(60_000)), 16, (Extent(1, 0, 3750),), "w", 1.0)
    data = record.encode("u", "n")
    assert len(data) == 1 << 18

    def answer(call: Call) -> Reply:
        assert isinstance(call, Commit)
        return Found(call.call_id, call.record, ())

    ends.serve(answer)
    caller = ends.caller()
    answers = [caller.call(0, Commit, "u", "n", data, 0) for _ in range(20)]
    assert all(UserRecord.decode(answer.wait().record, "u", "n") == record for answer in answers)


def test_a_quick_answer_overtakes_a_slow_one(ends: Ends, hold: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        if isinstance(call, Lookup) and call.uid == "slow":
            hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller()
    slow = caller.call(0, Lookup, "slow", "n")
    assert caller.ask(0, Lookup, "quick", "n").record == b"quick n"
    assert slow.replies == []
    hold.set()
    assert slow.wait().record == b"slow n"


def test_calls_are_answered_by_several_threads_at_once(ends: Ends) -> None:
    together = threading.Barrier(3, timeout=PATIENCE)

    def answer(call: Call) -> Reply:
        if not isinstance(call, Hello):
            together.wait()
        return echo(call)

    ends.serve(answer, threads=3)
    caller = ends.caller()
    answers = [caller.call(0, Lookup, str(i), "n") for i in range(6)]
    assert [answer.wait().record for answer in answers] == [f"{i} n".encode() for i in range(6)]


def test_no_answer_in_time(ends: Ends, hold: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        if isinstance(call, Lookup) and call.uid == "slow":
            hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller(timeout=0.3)
    start = time.monotonic()
    slow = [caller.call(0, Lookup, "slow", "n") for _ in range(2)]
    quick = caller.call(0, Lookup, "quick", "n")
    assert quick.wait().record == b"quick n"
    assert all(isinstance(answer.wait(), Failed) for answer in slow)
    assert 0.3 <= time.monotonic() - start < 2
    hold.set()
    assert caller.ask(0, Lookup, "later", "n").record == b"later n"
    assert [len(answer.replies) for answer in (*slow, quick)] == [1, 1, 1]


def test_patience(ends: Ends, hold: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that no request waits for, such as commits, may take longer; not for ever."""
    monkeypatch.setattr(lookup_rpc, "PATIENCE", 0.6)

    def answer(call: Call) -> Reply:
        if isinstance(call, Lookup) and call.uid == "slow":
            hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller(timeout=0.1)
    patient, hasty, first = Answer(), Answer(), Answer()
    start = time.monotonic()
    caller.client.call(0, Lookup, patient, "slow", "n", patient=True)
    caller.client.call(0, Lookup, hasty, "slow", "n")
    caller.client.call(0, Lookup, first, "quick", "n", patient=True)
    assert first.wait().record == b"quick n"
    assert isinstance(hasty.wait(), Failed)
    assert time.monotonic() - start < 0.5
    assert patient.replies == []
    assert isinstance(patient.wait(), Failed)
    assert time.monotonic() - start >= 0.6
    caller.client.call(0, Lookup, patient, "slow", "n", patient=True)
    hold.set()
    wait_until(lambda: len(patient.replies) == 2)
    assert isinstance(patient.replies[1], Found)


def test_nobody_there(ends: Ends) -> None:
    caller = ends.caller(timeout=0.2)
    start = time.monotonic()
    assert isinstance(caller.ask(0, Lookup, "u", "n"), Failed)
    assert 0.2 <= time.monotonic() - start < 2


def test_calling_returns_at_once_even_if_nobody_is_there(ends: Ends) -> None:
    """More calls than ZeroMQ queues by itself: each of them fails in time, and the client can be closed."""
    caller = ends.caller(timeout=0.5)
    start = time.monotonic()
    answers = [caller.call(0, Lookup, "u", "n") for _ in range(3000)]
    assert time.monotonic() - start < 2
    closing = threading.Thread(target=caller.client.close, daemon=True)
    try:
        assert all(isinstance(answer.wait(3), Failed) for answer in answers)
    finally:
        closing.start()
        closing.join(5)
        if closing.is_alive():
            ends.stack.pop_all()  # It would hang there too.
    assert not closing.is_alive()


def test_a_server_that_comes_later(ends: Ends) -> None:
    caller = ends.caller()
    early = caller.call(0, Lookup, "u", "n")
    time.sleep(0.05)
    ends.serve()
    assert early.wait().record == b"u n"


def test_notices_wait_for_the_scheduler(ends: Ends) -> None:
    server = ends.serve()
    for job in range(3):
        server.notify(Saved(job, job != 1))
    caller = ends.caller()
    wait_until(lambda: len(caller.notices) == 3)
    server.notify(Saved(3, True))
    wait_until(lambda: len(caller.notices) == 4)
    assert caller.notices == [(0, Saved(job, job != 1)) for job in range(4)]


def test_notices_go_to_the_last_scheduler(ends: Ends) -> None:
    server = ends.serve()
    first = ends.caller()
    assert first.ask(0, Lookup, "u", "n").record == b"u n"
    second = ends.caller(timeout=0.2)
    # What it asks before it is known is answered to the first one.
    wait_until(lambda: isinstance(second.ask(0, Lookup, "u", "n"), Found))
    server.notify(Saved(1, True))
    wait_until(lambda: second.notices)
    assert first.notices == []


def test_no_notice_is_lost_while_the_scheduler_is_busy(ends: Ends, hold: threading.Event) -> None:
    """The blocks of a save whose notice is lost are held for ever."""
    server = ends.serve()
    told: list[int] = []
    blocked = threading.Event()

    def on_saved(rank: int, notice: Saved) -> None:
        told.append(notice.job_id)
        if len(told) == 1:
            blocked.set()
            hold.wait(PATIENCE)

    client = MooncakeLookupClient([ends.endpoint], 5.0, on_saved)
    ends.stack.callback(client.close)
    server.notify(Saved(0, True))
    assert blocked.wait(PATIENCE)
    for job in range(1, 10_000):
        server.notify(Saved(job, True))
    time.sleep(0.2)
    hold.set()
    try:
        wait_until(lambda: len(told) == 10_000, 5)
    finally:
        assert told == list(range(10_000)), f"{len(told)} of 10000 notices arrived"


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_for_the_server(ends: Ends, data: bytes) -> None:
    asked: list[Call] = []
    server = ends.serve(lambda call: asked.append(call) or echo(call))  # type: ignore[func-returns-value]
    stranger = ends.socket(zmq.DEALER)
    for _ in range(3):
        stranger.send(data)
    last = Lookup(5, "stranger", "n")
    stranger.send(msgspec.msgpack.encode(last))
    wait_until(lambda: asked == [last])
    caller = ends.caller(timeout=1)
    assert caller.ask(0, Lookup, "u", "n").record == b"u n"
    server.notify(Saved(1, True))
    wait_until(lambda: caller.notices == [(0, Saved(1, True))])


@pytest.mark.parametrize("frames", [[b""], [b"", b"x"], [b"a", b"b"], [b"a", b"b", b"c"]], ids=len)
def test_messages_of_several_parts_for_the_server(ends: Ends, frames: list[bytes]) -> None:
    """Any other kind of ZeroMQ socket sends such."""
    ends.serve()
    stranger = ends.socket(zmq.DEALER)
    stranger.send_multipart(frames)
    questioner = ends.socket(zmq.REQ)
    questioner.send(b"hello")
    time.sleep(0.05)
    caller = ends.caller(timeout=1)
    assert caller.ask(0, Lookup, "u", "n").record == b"u n"


@pytest.mark.parametrize(
    "frames",
    [
        *([data] for data in GARBAGE),
        [b"", b""],
        [b"a", b"b"],
        [msgspec.msgpack.encode(Located(999_999))],
        [msgspec.msgpack.encode(["Saved", "x", True])],
    ],
    ids=range(len(GARBAGE) + 4),
)
def test_garbage_for_the_client(ends: Ends, frames: list[bytes]) -> None:
    """On a TCP port that somebody else has taken, anybody may answer."""
    context = zmq.Context()
    ends.stack.callback(context.term)
    router = context.socket(zmq.ROUTER)
    ends.stack.callback(router.close, 0)
    router.bind(ends.endpoint)
    caller = ends.caller(timeout=1)
    assert router.poll(5000)
    scheduler, data = router.recv_multipart()
    assert isinstance(msgspec.msgpack.decode(data, type=Call), Hello)
    for uid in ("u", "v"):
        answer = caller.call(0, Lookup, uid, "n")
        assert router.poll(5000)
        call = msgspec.msgpack.decode(router.recv_multipart()[1], type=Call)
        router.send_multipart([scheduler, *frames])
        router.send_multipart([scheduler, msgspec.msgpack.encode(Located(call.call_id, (uid,)))])
        assert answer.wait().tiers == (uid,)


def test_closing_the_client_while_calls_are_open(ends: Ends, hold: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller(timeout=60)
    answers = [caller.call(0, Lookup, "u", "n") for _ in range(50)]
    time.sleep(0.1)  # Until nothing comes that would wake the client.
    start = time.monotonic()
    caller.client.close()
    assert time.monotonic() - start < 2
    assert all(isinstance(answer.wait(0), Failed) for answer in answers)
    caller.client.close()
    hold.set()
    assert [len(answer.replies) for answer in answers] == [1] * 50


def test_a_call_from_a_callback(ends: Ends) -> None:
    ends.serve()
    caller = ends.caller()
    second = Answer()
    caller.client.call(0, Lookup, lambda reply: caller.client.call(0, Lookup, second, "second", "n"), "first", "n")
    assert second.wait().record == b"second n"


def test_a_call_after_closing_fails(ends: Ends) -> None:
    ends.serve()
    caller = ends.caller()
    caller.client.close()
    assert isinstance(caller.call(0, Lookup, "u", "n").wait(2), Failed)


def test_closing_the_server_answers_what_was_asked(ends: Ends, hold: threading.Event) -> None:
    begun = threading.Semaphore(0)

    def answer(call: Call) -> Reply:
        if not isinstance(call, Hello):
            begun.release()
            hold.wait(PATIENCE)
        return echo(call)

    server = ends.serve(answer, threads=2)
    caller = ends.caller()
    answers = [caller.call(0, Lookup, str(i), "n") for i in range(2)]
    for _ in answers:
        assert begun.acquire(timeout=PATIENCE)
    closing = threading.Thread(target=server.close)
    closing.start()
    time.sleep(0.05)
    hold.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert [answer.wait(2).record for answer in answers] == [b"0 n", b"1 n"]
    server.close()


def test_a_call_that_comes_while_the_server_closes(ends: Ends, hold: threading.Event) -> None:
    begun = threading.Event()

    def answer(call: Call) -> Reply:
        if not isinstance(call, Hello):
            begun.set()
            hold.wait(PATIENCE)
        return echo(call)

    server = ends.serve(answer)
    caller = ends.caller(timeout=1)
    running = caller.call(0, Lookup, "running", "n")
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=server.close)
    closing.start()
    time.sleep(0.05)
    late = caller.call(0, Lookup, "late", "n")
    time.sleep(0.05)
    server.notify(Saved(1, True))
    hold.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert running.wait().record == b"running n"
    assert late.wait()  # Answered or failed.
    wait_until(lambda: caller.notices == [(0, Saved(1, True))], 2)


def test_a_notice_after_closing_is_nothing(ends: Ends) -> None:
    """A transfer that outlives the shutdown still reports; the descriptor it would ring may be another file by then."""
    server = ends.serve()
    server.close()
    reader, writer = os.pipe()
    try:
        server.notify(Saved(1, True))
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 8)
    finally:
        os.close(reader)
        os.close(writer)


def test_nothing_is_left_behind(ends: Ends) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    server = ends.serve()
    caller = ends.caller()
    caller.ask(0, Lookup, "u", "n")
    directory = Path(ends.endpoint.removeprefix("ipc://")).parent
    assert ends.kind == "tcp" or directory.is_dir()
    caller.client.close()
    server.close()
    assert ends.kind == "tcp" or not directory.exists()
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_an_address_in_use() -> None:
    ends = Ends("tcp")
    with ends.stack:
        ends.serve()
        with pytest.raises(InvalidSettingError, match=r"in use.*lookup_rpc_port"):
            MooncakeLookupServer(ends.endpoint, echo)


def test_a_fault_in_an_answer_is_a_reply_too(ends: Ends) -> None:
    def answer(call: Call) -> Reply:
        raise KeyError("a fault of ours")

    ends.serve(answer)
    reply = ends.caller().ask(0, Lookup, "u", "n")
    assert isinstance(reply, Failed)
    assert "a fault of ours" in reply.reason


def test_many_threads_and_ranks(ends: Ends) -> None:
    def serve(rank: int) -> str:
        endpoint = ENDPOINTS[ends.kind]()
        ends.serve(lambda call: Found(call.call_id, f"{rank} {getattr(call, 'uid', '')}".encode(), ()), endpoint)
        return endpoint

    caller = ends.caller(*(serve(rank) for rank in range(3)))
    assert caller.client.num_ranks == 3
    wrong: list[object] = []

    def work(thread: int) -> None:
        answers = {
            (rank, f"{thread}-{i}"): caller.call(rank, Lookup, f"{thread}-{i}", "n")
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
