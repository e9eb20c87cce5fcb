"""The ranking endpoint on a FastAPI app like vLLM's, in front of an engine that is made up."""

import asyncio
import itertools
import json
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.logprobs import FlatLogprobs

from userkv.ranking.prompt import RankingFormat
from userkv.serving.rank.plugin import RankPlugin

CATALOGUE = list(range(100, 140))
"""Items of TABLE: the item 100 is the token 16."""

TABLE: dict[str, Any] = {
    "vocab_size": 128,
    "userkv_ranking": {
        "candidate_offset": 64,
        "items": {"kind": "table", "reserved": 16},
        "tasks": ["click", "like"],
        "task_weights": [1.0, 0.5],
        "max_item_tokens": 2,
    },
}
CODEC: dict[str, Any] = {
    "vocab_size": 216,
    "userkv_ranking": {
        "candidate_marker": 3,
        "items": {"kind": "codec", "base": 100, "digits": 2, "reserved": 16},
        "score": "logprob",
    },
}
LABEL: dict[str, Any] = {
    "vocab_size": 1016,
    "userkv_ranking": {"items": {"kind": "codec", "base": 1000, "digits": 1, "reserved": 16}, "score": "label"},
}


def task_scores(candidate: list[int], num_tasks: int) -> list[float]:
    """What the made-up model says about a candidate's tokens; few values, so that there are ties."""
    return [(sum(candidate) * (7 + task) % 11) / 16 for task in range(num_tasks)]


def label_score(history: list[int], token: int) -> float:
    """What the made-up decoder says about a token."""
    return -float((sum(history) + token * 7) % 11)


class FakeEngine:
    """Answers like vLLM's AsyncLLM. ``calls`` are the requests: prompt, parameters, id.

    ``data`` turns the scores into what the engine returns; ``failure`` is raised instead of an answer; while ``hold``
    is unset, requests wait. ``tiers`` is what the answers say about the cache.
    """

    def __init__(self, config: dict[str, Any], model: str) -> None:
        section = config.get("userkv_ranking", {})
        self.label = section.get("score") == "label"
        self.format = None if self.label or not section else RankingFormat.from_config(section)
        self.num_tasks = len(section.get("tasks", ["score"]))
        self.tasks = ("generate",) if self.label else ("classify",)
        model_config = SimpleNamespace(
            model=model, hf_config=SimpleNamespace(to_dict=lambda: config), max_model_len=1024
        )
        self.vllm_config = SimpleNamespace(model_config=model_config, kv_transfer_config=None)
        self.calls: list[tuple[list[int], Any, str]] = []
        self.cancelled: list[str] = []
        self.data: Callable[[Any], Any] = lambda data: data
        self.failure: BaseException | None = None
        self.hold: asyncio.Event | None = None
        self.started = asyncio.Event()
        self.tiers: dict[str, int] | None = None
        self.cached = 0
        self.version = "default"

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    async def get_weight_version(self) -> str:
        return self.version

    async def encode(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        tokens = prompt["prompt_token_ids"]
        await self._run(tokens, params, request_id)
        assert self.format is not None
        bounds = [*self.format.starts(tokens).tolist(), len(tokens)]
        rows = [task_scores(tokens[start:end], self.num_tasks) for start, end in itertools.pairwise(bounds)]
        data = torch.from_numpy(np.array(rows, np.float32).reshape(-1, self.num_tasks))
        yield self._output(outputs=SimpleNamespace(data=self.data(data)))

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        tokens = prompt["prompt_token_ids"]
        await self._run(tokens, params, request_id)
        labels = params.logprob_token_ids or []
        # The sampled token first; and a wider request of the same batch pads ours, with token 0.
        logprobs = FlatLogprobs()
        ours = [label_score(tokens, label) for label in labels]
        ids, values = [999, *labels, 0], [-0.5, *ours, float("-inf")]
        logprobs.append_fast(ids, values, iter([1] * len(ids)), [None] * len(ids))
        yield self._output(outputs=[SimpleNamespace(logprobs=self.data(logprobs) if labels else None)])

    async def _run(self, tokens: list[int], params: Any, request_id: str) -> None:
        self.calls.append((tokens, params, request_id))
        self.started.set()
        if self.failure is not None:
            raise self.failure
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.append(request_id)
                raise

    def _output(self, **fields: Any) -> Any:
        extra = {} if self.tiers is None else {"userkv_tiers": self.tiers}
        return SimpleNamespace(num_cached_tokens=self.cached, finished=True, **fields, **extra)


def make_app(config: dict[str, Any], directory: Path, names: list[str] | None = None) -> tuple[FastAPI, FakeEngine]:
    """The app and its engine. ``directory`` takes the model's item table."""
    (directory / "items.json").write_text(json.dumps(CATALOGUE))
    engine = FakeEngine(config, str(directory))
    app = FastAPI()
    args = Namespace(served_model_name=names or ["ranker"], model=str(directory), log_error_stack=False)
    app.state.args, app.state.engine_client = args, engine
    plugin = RankPlugin()
    plugin.attach_router(app)
    init_exception_handler(app)
    asyncio.run(plugin.init_state(engine, app.state, args))
    return app, engine


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve an app on a thread; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
