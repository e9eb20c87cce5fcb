"""The RPC between scheduler and workers when the other end is busy, gone, closing or somebody else."""

import os
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tests.support.lookup_rpc import ENDPOINTS, PATIENCE, Ends, echo, wait_until
from userkv.core.errors import InvalidSettingError
from userkv.engine.pool.wire.lookup_client import MooncakeLookupClient
from userkv.engine.pool.wire.lookup_server import MooncakeLookupServer
from userkv.engine.pool.wire.messages import (
    Call,
    ErrorReply,
    LocateReply,
    LookupCall,
    RegisterCall,
    Reply,
    SaveNotice,
)

GARBAGE = [
    b"",
    b"\xc1",
    b"\x93",
    b"hello",
    msgspec.msgpack.encode(["LookupCall"]),
    msgspec.msgpack.encode(["LookupCall", "1", "u", "n"]),
    msgspec.msgpack.encode(["Delete", 1, "u", "n"]),
    msgspec.msgpack.encode({"type": "LookupCall"}),
    msgspec.msgpack.encode(["LocateCall", 1, "u", "n", [[1, 2]]]),
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 100_000,
]


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


def test_calling_returns_at_once_even_if_nobody_is_there(ends: Ends) -> None:
    """More calls than ZeroMQ queues by itself: each of them fails in time, and the client can be closed."""
    caller = ends.caller(timeout=0.5)
    start = time.monotonic()
    answers = [caller.call(0, LookupCall, "u", "n") for _ in range(3000)]
    assert time.monotonic() - start < 2
    closing = threading.Thread(target=caller.client.close, daemon=True)
    try:
        assert all(isinstance(answer.wait(3), ErrorReply) for answer in answers)
    finally:
        closing.start()
        closing.join(5)
        if closing.is_alive():
            ends.stack.pop_all()  # It would hang there too.
    assert not closing.is_alive()


def test_no_notice_is_lost_while_the_scheduler_is_busy(ends: Ends, hold: threading.Event) -> None:
    """The blocks of a save whose notice is lost are held for ever."""
    server = ends.serve()
    noticed: list[int] = []
    blocked = threading.Event()

    def on_saved(rank: int, notice: SaveNotice) -> None:
        noticed.append(notice.job_id)
        if len(noticed) == 1:
            blocked.set()
            hold.wait(PATIENCE)

    client = MooncakeLookupClient([ends.endpoint], 5.0)
    client.start(on_saved)
    ends.stack.callback(client.close)
    server.notify(SaveNotice(0, True))
    assert blocked.wait(PATIENCE)
    for job in range(1, 10_000):
        server.notify(SaveNotice(job, True))
    time.sleep(0.2)
    hold.set()
    try:
        wait_until(lambda: len(noticed) == 10_000, 5)
    finally:
        assert noticed == list(range(10_000)), f"{len(noticed)} of 10000 notices arrived"


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_for_the_server(ends: Ends, data: bytes) -> None:
    asked: list[Call] = []
    server = ends.serve(lambda call: asked.append(call) or echo(call))  # type: ignore[func-returns-value]
    stranger = ends.socket(zmq.DEALER)
    for _ in range(3):
        stranger.send(data)
    last = LookupCall(5, "stranger", "n")
    stranger.send(msgspec.msgpack.encode(last))
    wait_until(lambda: asked == [last])
    caller = ends.caller(timeout=1)
    assert caller.ask(0, LookupCall, "u", "n").record == b"u n"
    server.notify(SaveNotice(1, True))
    wait_until(lambda: caller.notices == [(0, SaveNotice(1, True))])


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
    assert caller.ask(0, LookupCall, "u", "n").record == b"u n"


@pytest.mark.parametrize(
    "frames",
    [
        *([data] for data in GARBAGE),
        [b"", b""],
        [b"a", b"b"],
        [msgspec.msgpack.encode(LocateReply(999_999))],
        [msgspec.msgpack.encode(["SaveNotice", "x", True])],
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
    assert isinstance(msgspec.msgpack.decode(data, type=Call), RegisterCall)
    for uid in ("u", "v"):
        answer = caller.call(0, LookupCall, uid, "n")
        assert router.poll(5000)
        call = msgspec.msgpack.decode(router.recv_multipart()[1], type=Call)
        router.send_multipart([scheduler, *frames])
        router.send_multipart([scheduler, msgspec.msgpack.encode(LocateReply(call.call_id, (uid,)))])
        assert answer.wait().tiers == (uid,)


def test_closing_the_client_while_calls_are_open(ends: Ends, hold: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        hold.wait(PATIENCE)
        return echo(call)

    ends.serve(answer)
    caller = ends.caller(timeout=60)
    answers = [caller.call(0, LookupCall, "u", "n") for _ in range(50)]
    time.sleep(0.1)  # Until nothing comes that would wake the client.
    start = time.monotonic()
    caller.client.close()
    assert time.monotonic() - start < 2
    assert all(isinstance(answer.wait(0), ErrorReply) for answer in answers)
    caller.client.close()
    hold.set()
    assert [len(answer.replies) for answer in answers] == [1] * 50


def test_a_call_after_closing_fails(ends: Ends) -> None:
    ends.serve()
    caller = ends.caller()
    caller.client.close()
    assert isinstance(caller.call(0, LookupCall, "u", "n").wait(2), ErrorReply)


def test_closing_the_server_answers_what_was_asked(ends: Ends, hold: threading.Event) -> None:
    begun = threading.Semaphore(0)

    def answer(call: Call) -> Reply:
        if not isinstance(call, RegisterCall):
            begun.release()
            hold.wait(PATIENCE)
        return echo(call)

    server = ends.serve(answer, threads=2)
    caller = ends.caller()
    answers = [caller.call(0, LookupCall, str(i), "n") for i in range(2)]
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
        if not isinstance(call, RegisterCall):
            begun.set()
            hold.wait(PATIENCE)
        return echo(call)

    server = ends.serve(answer)
    caller = ends.caller(timeout=1)
    running = caller.call(0, LookupCall, "running", "n")
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=server.close)
    closing.start()
    time.sleep(0.05)
    late = caller.call(0, LookupCall, "late", "n")
    time.sleep(0.05)
    server.notify(SaveNotice(1, True))
    hold.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert running.wait().record == b"running n"
    assert late.wait()  # Answered or failed.
    wait_until(lambda: caller.notices == [(0, SaveNotice(1, True))], 2)


def test_a_notice_after_closing_is_nothing(ends: Ends) -> None:
    """A transfer that outlives the shutdown still reports; the descriptor it would ring may be another file by then."""
    server = ends.serve()
    server.close()
    reader, writer = os.pipe()
    try:
        server.notify(SaveNotice(1, True))
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 8)
    finally:
        os.close(reader)
        os.close(writer)


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
    reply = ends.caller().ask(0, LookupCall, "u", "n")
    assert isinstance(reply, ErrorReply)
    assert "a fault of ours" in reply.reason
