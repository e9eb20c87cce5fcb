"""The ranking clients against a server that misbehaves: what is tried again, and what each error is called."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from starlette.testclient import TestClient

from userkv.client import (
    AsyncRankClient,
    RankAnswerError,
    RankAuthError,
    RankClient,
    RankConflictError,
    RankConnectionError,
    RankError,
    RankRequestError,
    RankResult,
    RankServerError,
    RankTimeoutError,
    RetryPolicy,
    Score,
)
from userkv.core.errors import InvalidSettingError, UserKVError

GOOD = {
    "id": "rank-1",
    "model": "m",
    "scores": [{"item": 5, "score": 0.25}, {"item": [6, 7], "score": 0.5, "tasks": {"click": 0.5}}],
    "ranking": [[6, 7], 5],
    "usage": {
        "history_tokens": 3,
        "cached_tokens": {"hbm": 2, "dram": 0, "ssd": 0, "total": 2},
        "candidate_tokens": 3,
        "history_items_dropped": 0,
    },
    "timing": {"total_ms": 2.0, "prepare_ms": 0.5, "engine_ms": 1.0},
    "a_field_of_a_later_version": 1,
}
QUICK = RetryPolicy(retries=2, first_wait_s=0.001, longest_wait_s=0.002)

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(status: int, body: Any, **headers: str) -> Reply:
    async def reply(request: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers)

    return reply


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id": ')
    assert request.transport is not None
    request.transport.close()
    return response


class Server:
    """Gives the replies in ``script`` in turn, the last one again and again. ``asked`` are requests with bodies."""

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.asked: list[tuple[web.Request, Any]] = []
        self._end = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def stop_in_the_middle(self, request: web.Request) -> web.StreamResponse:
        """Begins an answer and does not end it before the test does."""
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id": ')
        await self.hang(request)
        return response

    async def hang(self, request: web.Request) -> web.StreamResponse:
        await self._end.wait()
        return web.Response()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application()
        app.add_routes([web.route("*", "/v1/rank", self._reply)])
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request, json.loads(body) if body else None))
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await reply(request)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class Caller:
    """The synchronous or the asynchronous client, called alike."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous

    def __call__(self, url: str, method: str = "rank", *args: Any, options: Any = None, **fields: Any) -> Any:
        options = {"retry": QUICK, "timeout_s": 5.0, **(options or {})}
        if method == "rank" and not args:
            args = ("u", [1, 2, 3], [5, [6, 7]])
        if not self.asynchronous:
            with RankClient(url, **options) as client:
                return getattr(client, method)(*args, **fields)

        async def call() -> Any:
            async with AsyncRankClient(url, **options) as client:
                return await getattr(client, method)(*args, **fields)

        return asyncio.run(call())


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Caller:
    return Caller(request.param)


def test_a_request_and_its_answer(server: Server, call: Caller) -> None:
    server.script = [answer(200, GOOD)]
    result = call(server.url + "/v1/", top_k=2, weights_version="w", options={"model": "m", "api_key": "secret"})
    assert isinstance(result, RankResult)
    assert result.scores == (Score(5, 0.25), Score([6, 7], 0.5, {"click": 0.5}))
    assert result.ranking == ([6, 7], 5)
    assert result.usage.cached_tokens.hbm == 2
    ((request, body),) = server.asked
    assert body == {
        "user_id": "u",
        "history": [1, 2, 3],
        "candidates": [5, [6, 7]],
        "model": "m",
        "top_k": 2,
        "weights_version": "w",
    }
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Content-Type"] == "application/json"


def test_arrays_and_tuples_are_items_too(server: Server, call: Caller) -> None:
    server.script = [answer(200, GOOD)]
    call(server.url, "rank", "u", np.array([[1, 2], [3, 4]], np.int32), (np.int64(5), np.array([6, 7])), model="other")
    body = server.asked[0][1]
    assert (body["history"], body["candidates"], body["model"]) == ([[1, 2], [3, 4]], [5, [6, 7]], "other")


@pytest.mark.parametrize("items", [[1.5], ["1"], [None], 5])
def test_what_is_no_item_is_refused_before_it_is_sent(server: Server, call: Caller, items: Any) -> None:
    server.script = [answer(400, {"error": {"message": "no item", "param": "history"}})]
    with pytest.raises((TypeError, RankRequestError)):
        call(server.url, "rank", "u", items, [1])


def test_prefill(server: Server, call: Caller) -> None:
    server.script = [answer(200, {**GOOD, "scores": [], "ranking": []})]
    assert call(server.url, "prefill", "u", [1, 2]).scores == ()
    assert server.asked[0][1] == {"user_id": "u", "history": [1, 2], "stage": "prefill"}


@pytest.mark.parametrize("trouble", [answer(s, "busy") for s in (429, 502, 503, 504)] + [hang_up, break_off])
def test_what_passes_is_tried_again(server: Server, call: Caller, trouble: Reply) -> None:
    server.script = [trouble, trouble, answer(200, GOOD)]
    assert call(server.url).id == "rank-1"
    assert [body for _, body in server.asked] == [server.asked[0][1]] * 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_stays_busy(server: Server, call: Caller, status: int) -> None:
    server.script = [answer(status, {"error": {"message": "too many\nrequests"}})]
    with pytest.raises(RankServerError, match=r"^too many requests$") as caught:
        call(server.url)
    assert caught.value.status == status
    assert len(server.asked) == 3


def test_a_server_that_keeps_hanging_up(server: Server, call: Caller) -> None:
    server.script = [hang_up]
    with pytest.raises(RankConnectionError, match=r"cannot be reached .*; start the server or correct the address"):
        call(server.url)
    assert len(server.asked) == 3


def test_text_that_is_no_unicode_is_not_sent(server: Server, call: Caller) -> None:
    with pytest.raises(RankRequestError, match="not valid Unicode; remove lone surrogates"):
        call(server.url, "rank", "\ud800", [1], [2])
    assert not server.asked


def test_nobody_listens(call: Caller) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(RankConnectionError, match=r"cannot be reached \(.*refused") as caught:
            call(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert caught.value.status is None
    assert isinstance(caught.value, UserKVError)


@pytest.mark.parametrize("begun", [False, True], ids=["nothing came", "it stopped in the middle"])
def test_a_slow_answer_is_not_tried_again(server: Server, call: Caller, begun: bool) -> None:
    server.script = [server.stop_in_the_middle if begun else server.hang]
    with pytest.raises(RankTimeoutError, match=r"did not answer in 0\.2 s"):
        call(server.url, options={"timeout_s": 0.2})
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RankRequestError),
        (401, RankAuthError),
        (403, RankAuthError),
        (404, RankRequestError),
        (409, RankConflictError),
        (500, RankServerError),
        (501, RankServerError),
        (307, RankAnswerError),
    ],
)
def test_what_does_not_pass_is_not_tried_again(
    server: Server, call: Caller, status: int, kind: type[RankError]
) -> None:
    server.script = [answer(status, {"error": {"message": "because", "param": "history"}}, Location="/v1/rank")]
    with pytest.raises(RankError) as caught:
        call(server.url)
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert len(server.asked) == 1
    if status < 500 and kind is not RankAnswerError:
        assert "because" in caught.value.message
        assert caught.value.param == "history"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
        ("<html>\n<h1>oh</h1>", "<html> <h1>oh</h1>"),
        (["odd"], "['odd']"),
        ("", "http://"),
    ],
)
def test_errors_in_other_formats(server: Server, call: Caller, body: Any, message: str) -> None:
    server.script = [answer(404, body)]
    with pytest.raises(RankRequestError) as caught:
        call(server.url)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>",
        "[]",
        "[" * 100_000,
        {"choices": []},
        {**GOOD, "scores": GOOD["scores"][:1]},  # type: ignore[index]
        {**GOOD, "scores": [{"item": 5, "score": None}, {"item": 6, "score": 1}]},
        {**GOOD, "usage": {}},
    ],
)
def test_an_answer_of_something_else(server: Server, call: Caller, body: Any) -> None:
    server.script = [answer(200, body)]
    with pytest.raises(RankAnswerError, match="correct the address"):
        call(server.url)


def test_the_server_says_when_to_come_back(server: Server, call: Caller) -> None:
    server.script = [answer(503, "", **{"Retry-After": "1"}), answer(200, GOOD)]
    began = time.monotonic()
    call(server.url, options={"retry": RetryPolicy(1, 0.0, 0.3)})
    assert time.monotonic() - began >= 0.3  # Not the whole second: no longer than the policy's limit.


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("127.0.0.1:8000", {}, "must start with http:// or https://"),
        ("http://x", {"timeout_s": 0}, "timeout_s must be more than 0"),
        ("http://x", {"timeout_s": float("nan")}, "timeout_s must be more than 0"),
        ("http://x", {"api_key": "a\nb"}, "must be printable ASCII"),
    ],
)
def test_options_that_cannot_be_used(call: Caller, url: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSettingError, match=says):
        call(url, options=options)


@pytest.mark.parametrize("numbers", [(-1,), (1.5,), (1, -1.0), (1, 2.0, 1.0), (1, 1.0, float("inf"))])
def test_policies_that_cannot_be_used(numbers: Any) -> None:
    with pytest.raises(InvalidSettingError):
        RetryPolicy(*numbers)


def test_waits_double_up_to_a_limit() -> None:
    policy = RetryPolicy(retries=5, first_wait_s=1.0, longest_wait_s=5.0)
    for attempt, (low, high) in enumerate([(0.5, 1), (1, 2), (2, 4), (4, 5), (5, 5)]):
        assert all(low <= (policy.wait_s(attempt) or 0) <= high for _ in range(50))
    assert policy.wait_s(5) is None
    assert policy.wait_s(0, "3") == 3
    assert policy.wait_s(0, "99999999999999999999") == 5
    assert (policy.wait_s(0, "Wed, 21 Oct 2026 07:28:00 GMT") or 0) <= 1


def test_threads_share_a_client(server: Server) -> None:
    server.script = [answer(200, GOOD)]
    with RankClient(server.url) as client:
        threads = [threading.Thread(target=client.rank, args=("u", [1], [5, [6, 7]])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.asked) == 8


def test_the_client_and_the_endpoint_fit(tmp_path: Path, call: Caller) -> None:
    from tests.support.ranking import TABLE, make_app, serving

    app, engine = make_app(TABLE, tmp_path)
    with serving(app) as url:
        result = call(url, "rank", "u", [100, [17]], [110, 111], top_k=1)
        assert [score.item for score in result.scores] == [110, 111]
        assert len(result.ranking) == 1
        assert call(url, "prefill", "u", [100]).scores == ()
        assert call(url, "info").items["count"] == 40
        with pytest.raises(RankRequestError, match="item 5 is not in the model's catalogue") as caught:
            call(url, "rank", "u", [5], [110])
        assert caught.value.status == 400
    assert len(engine.calls) == 2
    assert TestClient(app)


def test_it_needs_neither_vllm_nor_torch() -> None:
    code = "import sys, userkv.client; print({'vllm', 'torch', 'transformers'} & {name for name in sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
