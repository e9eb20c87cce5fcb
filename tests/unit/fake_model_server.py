"""A stand-in for a model server, on a thread of its own: enough of the completions interface for the replay driver."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web

MODEL = "fake-model"


class FakeModelServer:
    """Counts the longest common prefix with a user's previous prompt as cached tokens.

    ``misbehave`` maps a user to what goes wrong with his requests: an HTTP status, "error" (inside the stream),
    "torn" (the stream ends early), "garbage" (no JSON in the stream) or "hang". ``bodies`` are the requests, in order.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.misbehave: dict[str | None, int | str] = {}
        self.tell_cached = True
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
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._complete)])
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
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
        if self.tell_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached(user, prompt)}
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


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()
