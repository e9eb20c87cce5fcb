"""``/v1/rank``: whatever comes in, the answer is all scores or one sentence in OpenAI's format."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import RetryableRequestError, VLLMValidationError

from tests.support.ranking import LABEL, TABLE, FakeEngine, make_app
from userkv.client.wire import RankRequest
from userkv.core.errors import InvalidUserRequestError

BODY = {"user_id": "u", "history": [100, 101], "candidates": [110, 111]}
App = tuple[FastAPI, FakeEngine, TestClient]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def app(directory: Path) -> App:
    app, engine = make_app(TABLE, directory)
    return app, engine, TestClient(app)


def refused(http: TestClient, status: int, body: Any = None, **fields: Any) -> Any:
    """The error of a request that must fail in the documented format."""
    content = body if isinstance(body, bytes) else json.dumps({**BODY, **fields} if body is None else body).encode()
    answer = http.post("/v1/rank", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"history": [100, 99]}, "history", "item 99 is not in the model's catalogue; leave it out"),
        ({"candidates": [10**40]}, "candidates", "is not in the model's catalogue"),
        ({"candidates": []}, "candidates", "candidates is empty; send at least one, or stage 'prefill'"),
        ({"history": [[64]]}, "history", "reserved for the start of a candidate"),
        ({"candidates": [[16, 70]]}, "candidates", "reserved for the start of a candidate"),
        ({"history": [[128]]}, "history", "must be tokens from 0 to 127"),
        ({"history": [[10**30]]}, "history", "must be tokens from 0 to 127"),
        ({"history": [[]]}, "history", "at least one"),
        ({"history": [[16, 17, 18]]}, "history", "more than the model's 2 tokens"),
        ({"history": [100] * 1023}, "candidates", "1023 tokens of history and 2 of candidates are more than the 1024"),
        ({"history": [100] * 1025}, "history", "1025 tokens of history and 2 of candidates are more than the 1024"),
        ({"history": [True]}, "history", "history[0] must be a whole number or a list of tokens, not true or false"),
        ({"history": [1.0]}, "history", "history[0] must be a whole number or a list of tokens, not a fraction"),
        ({"history": ["100"]}, "history", "history[0] must be a whole number or a list of tokens, not a string"),
        ({"history": [None]}, "history", "history[0] must be a whole number or a list of tokens, not null"),
        ({"candidates": [[16, "x"]]}, "candidates", "candidates[0][1] must be a whole number"),
        ({"candidates": [[16, [1]]]}, "candidates", "candidates[0][1] must be a whole number"),
        ({"history": 100}, "history", "history must be a list of items, not 100"),
        ({"history": None}, "history", "history must be a list of items, not null"),
        ({"user_id": 7}, "user_id", "user_id must be a string of 1 to 256 bytes, not 7"),
        ({"user_id": None}, "user_id", "user_id must be a string of 1 to 256 bytes, not null"),
        ({"user_id": ""}, None, "user_id must have 1 to 256 bytes"),
        ({"user_id": "ä" * 129}, None, "user_id must have 1 to 256 bytes of UTF-8, not 258"),
        ({"top_k": 0}, "top_k", "top_k must be a whole number of at least 1"),
        ({"top_k": True}, "top_k", "top_k must be a whole number of at least 1, not true or false"),
        ({"top_k": "3"}, "top_k", "top_k must be a whole number of at least 1, not a string"),
        ({"stage": "decode"}, None, "stage must be one of rank, prefill"),
        ({"stage": 1}, "stage", "stage must be a string, not 1"),
        ({"stage": "prefill"}, "candidates", "stage 'prefill' scores nothing; leave candidates out"),
        ({"stage": "prefill", "candidates": [], "history": []}, "history", "nothing to prefill"),
        ({"candidate": [1]}, "candidate", "there is no field 'candidate'; did you mean 'candidates'?"),
        ({"topk": 1}, "topk", "there is no field 'topk'; did you mean 'top_k'?"),
        ({"user": "u"}, "user", "there is no field 'user'; did you mean 'user_id'?"),
        ({"temperature": 1}, "temperature", "there is no field 'temperature'; the fields are user_id, "),
    ],
)
def test_one_sentence_says_what_to_change(app: App, fields: dict[str, Any], param: str | None, says: str) -> None:
    error = refused(app[2], 400, **fields)
    assert says in error["message"]
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert app[1].calls == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the request is no JSON"),
        (b"{", "the request is no JSON"),
        (b'{"user_id": "\xff", "history": []}', "the request is no JSON"),
        (b'{"user_id": "u", "history": [NaN]}', "the request is no JSON"),
        (b'{"user_id": "u", "history": [Infinity]}', "the request is no JSON"),
        (b'{"user_id": "\\ud800", "history": []}', "the request is no JSON"),
        (b"[" * 200_000, "the request is no JSON"),
        (b'{"user_id": "u", "history": ' + b"[" * 200_000, "the request is no JSON"),
        (b'{"user_id": 1, "user_id": "u", "history": [100]}', "the request: Expected `str`"),
        (b'{"user_id": 1, "history": ', "the request is no JSON"),
        (b'{"user_id": "u", "history": [' + b"9" * 5000 + b"]}", "history"),
        (b"[]", "the request must be a JSON object with user_id and history, not a list"),
        (b"null", "the request must be a JSON object with user_id and history, not null"),
        ({"history": [100]}, "user_id is missing; add it to the request"),
        ({"user_id": "u"}, "history is missing; add it to the request"),
        ({"user_id": "u", "history": [100]}, "candidates is empty"),
    ],
)
def test_bodies_that_are_no_request(app: App, body: Any, says: str) -> None:
    assert says in refused(app[2], 400, body)["message"]


def test_an_unknown_model(app: App) -> None:
    error = refused(app[2], 404, model="other")
    assert (error["type"], error["message"]) == ("NotFoundError", "there is no model 'other'; this server has 'ranker'")


def test_other_weights(app: App) -> None:
    error = refused(app[2], 409, weights_version="day-2")
    assert error["type"] == "ConflictError"
    assert "version 'default' of the weights, not 'day-2'" in error["message"]
    assert app[1].calls == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_a_browser_sends_unasked(app: App, kind: str) -> None:
    answer = app[2].post("/v1/rank", content=json.dumps(BODY), headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert "must be application/json" in answer.json()["error"]["message"]


def test_messages_do_not_grow_with_the_request(app: App) -> None:
    assert len(refused(app[2], 400, candidates=[[70] * 900])["message"]) < 700


def test_a_decoder_needs_a_history_and_a_place_for_the_label(directory: Path) -> None:
    http = TestClient(make_app(LABEL, directory)[0])
    assert "history has no items" in refused(http, 400, history=[], candidates=[1])["message"]
    assert "1024 tokens of history and 1 of candidates" in refused(http, 400, history=[1] * 1024)["message"]
    assert "has 2 tokens; a label is one token" in refused(http, 400, history=[1], candidates=[[17, 18]])["message"]


def without_a_row(data: Any) -> Any:
    return data[1:]


def with_a_nan(data: Any) -> Any:
    data[1, 0] = float("nan")
    return data


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_a_row, "scores of shape [1, 2] instead of [2, 2]"),
        (with_a_nan, "lost the scores of 1 of 2 candidates"),
        (lambda data: torch.full_like(data, float("inf")), "lost the scores of 2 of 2 candidates"),
        (lambda data: data[:, :1], "scores of shape [2, 1] instead of [2, 2]"),
    ],
)
def test_scores_that_the_engine_lost_are_an_error(app: App, spoil: Any, says: str) -> None:
    app[1].data = spoil
    error = refused(app[2], 500)
    assert error["type"] == "InternalServerError"
    assert says in error["message"]


@pytest.mark.parametrize("spoil", [lambda logprobs: None, lambda logprobs: logprobs[:0]])
def test_labels_that_the_engine_lost_are_an_error(directory: Path, spoil: Any) -> None:
    app, engine = make_app(LABEL, directory)
    engine.data = spoil
    assert "the engine returned" in refused(TestClient(app), 500, history=[1], candidates=[1, 2])["message"]


def test_labels_of_other_tokens_are_an_error(directory: Path) -> None:
    app, engine = make_app(LABEL, directory)

    def swapped(logprobs: Any) -> Any:
        logprobs.token_ids[1:3] = logprobs.token_ids[2:0:-1]
        return logprobs

    engine.data = swapped
    assert "other tokens" in refused(TestClient(app), 500, history=[1], candidates=[1, 2])["message"]


@pytest.mark.parametrize(
    ("failure", "status", "says"),
    [
        (InvalidUserRequestError("history_len is wrong"), 400, "history_len is wrong"),
        (ValueError("not like this"), 400, "not like this"),
        (VLLMValidationError("too long", parameter="prompt"), 400, "too long"),
        (RetryableRequestError("preempted"), 503, "preempted"),
    ],
)
@pytest.mark.parametrize("config", [TABLE, LABEL])
def test_what_the_engine_raises(
    directory: Path, config: dict[str, Any], failure: Exception, status: int, says: str
) -> None:
    app, engine = make_app(config, directory)
    engine.failure = failure
    items = {"history": [100], "candidates": [*range(100, 140)]}
    assert says in refused(TestClient(app), status, **items)["message"]


def test_a_model_that_does_not_rank(directory: Path) -> None:
    app, _ = make_app({"vocab_size": 128}, directory)
    http = TestClient(app)
    error = refused(http, 501)
    assert "is no ranking model (its config.json has no 'userkv_ranking')" in error["message"]
    assert error["type"] == "NotImplementedError"
    assert http.get("/v1/rank").status_code == 501


def test_a_ranking_model_under_the_wrong_runner(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "get_supported_tasks", _generate_only)
    app, _ = make_app(TABLE, directory)
    assert "restart it so" in refused(TestClient(app), 501)["message"]


async def _generate_only(engine: FakeEngine) -> tuple[str, ...]:
    return ("generate",)


def test_the_api_key_of_the_server_is_asked_for(app: App) -> None:
    app[0].add_middleware(AuthenticationMiddleware, tokens=["secret"])
    for method in ("GET", "POST"):
        assert app[2].request(method, "/v1/rank", json=BODY).status_code == 401
        right = app[2].request(method, "/v1/rank", json=BODY, headers={"Authorization": "Bearer secret"})
        assert right.status_code == 200


@pytest.mark.parametrize("config", [TABLE, LABEL])
def test_a_client_that_hangs_up_aborts_its_request(directory: Path, config: dict[str, Any]) -> None:
    app, engine = make_app(config, directory)
    body = json.dumps({"user_id": "u", "history": [100], "candidates": [*range(100, 140)]}).encode()

    async def ask() -> None:
        engine.hold = asyncio.Event()
        engine.started = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await engine.started.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/rank", "headers": headers, "query_string": b""}
        await asyncio.wait_for(app(scope | {"root_path": "", "http_version": "1.1"}, receive, send), 10)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(ask())
    assert engine.cancelled == [request_id for _, _, request_id in engine.calls]
    assert engine.cancelled


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ITEM = st.sampled_from(range(95, 145)) | st.lists(st.integers(-1, 130), max_size=3)
REQUEST = st.fixed_dictionaries(
    {},
    optional={
        "user_id": st.text(max_size=4) | JSON,
        "history": st.lists(ITEM, max_size=6) | st.lists(JSON, max_size=3) | JSON,
        "candidates": st.lists(ITEM, max_size=6) | st.lists(JSON, max_size=3) | JSON,
        "top_k": st.integers(-1, 9) | JSON,
        "stage": st.sampled_from(["rank", "prefill"]) | JSON,
        "model": st.sampled_from(["ranker", "other"]) | JSON,
        "weights_version": st.sampled_from(["default", "other"]) | JSON,
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=REQUEST | JSON)
@example(body={"user_id": "u", "history": [2**63], "candidates": [[2**64]]})
def test_any_json_is_answered_or_refused(app: App, body: Any) -> None:
    answer = app[2].post("/v1/rank", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404, 409), answer.text
    if answer.status_code == 200:
        assert len(answer.json()["scores"]) == len(body.get("candidates", []))
    else:
        assert answer.json()["error"]["message"]


ITEMS = st.lists(st.sampled_from(range(100, 140)) | st.lists(st.integers(0, 63), min_size=1, max_size=2), max_size=40)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=ITEMS, candidates=ITEMS.filter(bool), top_k=st.integers(1, 50))
def test_as_many_scores_as_candidates_and_a_ranking_by_them(
    app: App, history: list[Any], candidates: list[Any], top_k: int
) -> None:
    body = {"user_id": "u", "history": history, "candidates": candidates, "top_k": top_k}
    answer = app[2].post("/v1/rank", json=body).json()
    scores = [score["score"] for score in answer["scores"]]
    assert [score["item"] for score in answer["scores"]] == candidates
    order = sorted(range(len(candidates)), key=lambda place: (-scores[place], place))
    assert answer["ranking"] == [candidates[place] for place in order[:top_k]]
    assert all(np.isfinite(scores))


def test_the_aliases_are_no_fields() -> None:
    from userkv.client import request

    assert set(request._ALIASES.values()) <= set(RankRequest.__struct_fields__)
    assert not set(request._ALIASES) & set(RankRequest.__struct_fields__)
