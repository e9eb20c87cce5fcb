"""Label scoring with a real engine: a stock decoder, with next tokens as candidates, behind ``/v1/rank``."""

import asyncio
import json
import random
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from tests.support.engine import TOLERANCE
from tests.support.patching import put_users_into_vllm
from userkv.core.request import UserRequest
from userkv.ranking.item_codec import DEFAULT_RESERVED
from userkv.serving.demo_model import VOCAB_SIZE, ensure_demo_model
from userkv.serving.rank.plugin import RankPlugin

pytestmark = pytest.mark.e2e

NUM_ITEMS = VOCAB_SIZE - DEFAULT_RESERVED


class Ranker:
    """The endpoint in front of an engine of this process, on an event loop of its own."""

    def __init__(self, engine: Any, app: FastAPI, runner: asyncio.Runner) -> None:
        self.engine = engine
        self._app = app
        self._runner = runner

    def rank(self, *bodies: dict[str, Any]) -> list[Any]:
        """Send requests all at once; their answers."""
        return self._runner.run(self._rank(bodies))

    async def _rank(self, bodies: tuple[dict[str, Any], ...]) -> list[Any]:
        return await asyncio.gather(*(self._post(json.dumps(body).encode()) for body in bodies))

    async def _post(self, body: bytes) -> Any:
        sent: list[Any] = [{"type": "http.request", "body": body}]
        got = bytearray()

        async def receive() -> Any:
            return sent.pop() if sent else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            got.extend(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        where = {"type": "http", "method": "POST", "path": "/v1/rank", "root_path": "", "query_string": b""}
        await self._app(where | {"headers": headers, "http_version": "1.1"}, receive, send)
        return json.loads(got)

    def logprobs(self, history: list[int], labels: list[int]) -> list[float]:
        """The same without the endpoint and without any cache: each label by a request of its own."""
        return self._runner.run(self._logprobs(history, labels))

    async def _logprobs(self, history: list[int], labels: list[int]) -> list[float]:
        from vllm import SamplingParams

        async def ask(label: int) -> float:
            params = SamplingParams(
                max_tokens=1, temperature=0, logprob_token_ids=[label], skip_reading_prefix_cache=True
            )
            prompt = {"prompt_token_ids": history}
            async for output in self.engine.generate(prompt, params, f"alone-{label}-{random.random()}"):
                last = output
            return float(last.outputs[0].logprobs[0][label].logprob)

        return [await ask(label) for label in labels]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranker]:
    directory = tmp_path_factory.mktemp("decoder") / "model"
    shutil.copytree(ensure_demo_model(), directory)
    config = json.loads((directory / "config.json").read_text())
    items = {"kind": "codec", "base": NUM_ITEMS, "digits": 1, "reserved": DEFAULT_RESERVED}
    config["userkv_ranking"] = {"items": items, "score": "label"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as monkeypatch, asyncio.Runner() as runner:
        put_users_into_vllm(monkeypatch)
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        engine = _engine(directory)
        try:
            yield Ranker(engine, runner.run(_app(engine, directory)), runner)
        finally:
            engine.shutdown(timeout=10)


def _engine(directory: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(directory),
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=2**26,
            max_model_len=1024,
            block_size=32,
        )
    )


async def _app(engine: Any, directory: Path) -> FastAPI:
    app = FastAPI()
    args = Namespace(served_model_name=["decoder"], model=str(directory), log_error_stack=False)
    app.state.args = args
    plugin = RankPlugin()
    plugin.attach_router(app)
    init_exception_handler(app)
    await plugin.init_state(engine, app.state, args)
    return app


def test_scores_are_log_probabilities_whatever_the_cache_holds(ranker: Ranker) -> None:
    rng = random.Random(1)
    history = [rng.randrange(NUM_ITEMS) for _ in range(200)]
    candidates = [rng.randrange(NUM_ITEMS) for _ in range(300)]
    body = {"user_id": "returning", "history": history, "candidates": candidates}
    (cold,) = ranker.rank(body)
    (warm,) = ranker.rank(body)
    assert cold["usage"]["cached_tokens"]["total"] == 0
    assert warm["usage"]["cached_tokens"]["hbm"] == 199  # The last one is computed, since the label follows it.
    sample = rng.sample(range(300), 20)
    tokens = [DEFAULT_RESERVED + item for item in history]
    expected = ranker.logprobs(tokens, [DEFAULT_RESERVED + candidates[place] for place in sample])
    for answer in (cold, warm):
        assert [score["item"] for score in answer["scores"]] == candidates
        assert [answer["scores"][place]["score"] for place in sample] == pytest.approx(expected, abs=TOLERANCE)


def test_the_user_is_read_once_for_all_requests_to_the_engine(ranker: Ranker, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    parse = UserRequest.parse.__func__  # type: ignore[attr-defined]

    def counted(cls: type, *args: Any) -> Any:
        read.append(args)
        return parse(cls, *args)

    monkeypatch.setattr(UserRequest, "parse", classmethod(counted))
    candidates = list(range(300))  # Three requests to the engine.
    (answer,) = ranker.rank({"user_id": "read once", "history": [1, 2, 3], "candidates": candidates})
    assert len(answer["scores"]) == 300
    assert len(read) == 1


def test_batches_of_users_with_other_numbers_of_candidates(ranker: Ranker) -> None:
    # In one batch of vLLM's sampler the rows of few labels are padded with token 0. Its number must not be taken.
    rng = random.Random(2)
    bodies = [
        {
            "user_id": f"user-{number}",
            "history": [rng.randrange(NUM_ITEMS) for _ in range(40 + number)],
            "candidates": [[0], *rng.sample(range(NUM_ITEMS), 1 + 40 * number)],
        }
        for number in range(5)
    ]
    for body, answer in zip(bodies, ranker.rank(*bodies), strict=True):
        scores = [score["score"] for score in answer["scores"]]
        labels = [0, *(DEFAULT_RESERVED + item for item in body["candidates"][1:4])]  # type: ignore[index]
        history = [DEFAULT_RESERVED + item for item in body["history"]]  # type: ignore[operator]
        assert scores[:4] == pytest.approx(ranker.logprobs(history, labels), abs=TOLERANCE)
        assert len(scores) == len(body["candidates"])  # type: ignore[arg-type]


def test_prefill_makes_the_next_request_fast(ranker: Ranker) -> None:
    history = list(range(100, 250))
    (prefilled,) = ranker.rank({"user_id": "opens-the-app", "history": history, "stage": "prefill"})
    assert prefilled["scores"] == prefilled["ranking"] == []
    (ranked,) = ranker.rank({"user_id": "opens-the-app", "history": history, "candidates": [1, 2, 3]})
    assert ranked["usage"]["cached_tokens"]["hbm"] == 149


def test_too_long_for_the_engine(ranker: Ranker) -> None:
    (answer,) = ranker.rank({"user_id": "u", "history": [1] * 1024, "candidates": [1]})
    assert answer["error"]["code"] == 400
