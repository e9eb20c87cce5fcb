"""A stand-in for a model server, on a thread of its own: enough of the completions interface for the replay driver."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from typing import Any

from aiohttp import web

MODEL = "fake-model"


class FakeModelServer:
    """Counts the longest common prefix with a user's previous prompt as cached tokens.

    ``misbehave`` maps a user to what goes wrong with his requests: an HTTP status, "error" (inside the stream),
    "torn" (the stream ends early), "garbage" (no JSON in the stream) or "hang". ``bodies`` are the requests, in order.
    ``tier_of`` says where users' cached tokens come from ("hbm", "dram" or "ssd"); ``None`` is a server that does not
    count them. The metrics page shows a request when the next one has come, as an engine's may. ``page`` replaces it.
    ``api_key`` is asked for under ``/v1``.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.misbehave: dict[str | None, int | str] = {}
        self.tell_cached = True
        self.tier_of: dict[str, str] | None = None
        self.page: str | None = None
        self.api_key: str | None = None
        self._counted: Counter[str] = Counter()
        self._shown: Counter[str] = Counter()
        self._prompts: dict[str, list[int]] = {}
        self._end = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeModelServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._authenticate])
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._complete)])
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        asked = self.api_key is not None and request.path.startswith("/v1")
        if asked and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0"} 1.0']
        if self.tier_of is not None:
            lines += ["# TYPE userkv_hit_tokens_total counter"]
            lines += [f'{name}{{engine="0"{label}}} {self._shown[source]}.0' for source, name, label in _METRICS]
        return web.Response(text="\n".join(lines) + "\n" if self.page is None else self.page)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self._shown = self._counted.copy()
        user = (body.get("kv_transfer_params") or {}).get("user_id")
        trouble = self.misbehave.get(user)
        if isinstance(trouble, int):
            return web.json_response({"error": {"message": f"no luck\nfor {user}"}}, status=trouble)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if trouble == "hang":
            await self._end.wait()
        if trouble == "garbage":
            await response.write(b"data: <html>\n\n")
        elif trouble == "error":
            await response.write(b'data: {"error": {"message": "engine trouble"}}\n\ndata: [DONE]\n\n')
        else:
            await self._answer(response, body, user, torn=trouble == "torn")
        await response.write_eof()
        return response

    async def _answer(self, response: web.StreamResponse, body: dict[str, Any], user: str | None, torn: bool) -> None:
        await response.write(_event({"choices": [{"index": 0, "text": "x"}]}))
        if torn:
            return
        prompt = body["prompt"]
        usage: dict[str, Any] = {"prompt_tokens": len(prompt)}
        cached = self._cached(user, prompt)
        if self.tell_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if user is not None and self.tier_of is not None:
            history_len = body["kv_transfer_params"]["history_len"]
            self._counted["history"] += history_len
            self._counted[self.tier_of.get(user, "hbm")] += min(cached, history_len)
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")

    def _cached(self, user: str | None, prompt: list[int]) -> int:
        if user is None:
            return 0
        before = self._prompts.get(user, [])
        self._prompts[user] = prompt
        for index, (old, new) in enumerate(zip(before, prompt, strict=False)):
            if old != new:
                return index
        return min(len(before), len(prompt))


_METRICS = (
    ("history", "userkv_history_tokens_total", ""),
    ("hbm", "userkv_hit_tokens_total", ""),
    ("dram", "userkv_swapin_tokens_total", ',tier="dram"'),
    ("ssd", "userkv_swapin_tokens_total", ',tier="ssd"'),
)


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()
