"""A model server with the completions interface of OpenAI, as ``userkv serve`` and ``vllm serve`` have it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from userkv.core.errors import InvalidSettingError
from userkv.replay.readings import ENGINE_PREFIXES
from userkv.replay.target import Outcome

_NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError)


class HttpTarget:
    """Sends requests to ``POST {server}/v1/completions`` as token ids and reads the answer as a stream.

    server: base address, such as http://127.0.0.1:8000 (a trailing /v1 is fine). model: its name; None asks the
    server for its first model. max_tokens: tokens to generate per request. timeout_s: seconds until a request counts
    as failed. api_key: what the server was given as --api-key.
    """

    def __init__(
        self,
        server: str,
        *,
        model: str | None = None,
        max_tokens: int = 1,
        timeout_s: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        self._base = server.rstrip("/").removesuffix("/v1")
        if not self._base.startswith(("http://", "https://")):
            raise InvalidSettingError(f"The server address must start with http:// or https://, not {server!r}.")
        self._model = model
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Connects. Raises InvalidSettingError if the server is not there or does not know the model."""
        # No limit on connections: how many requests run at once is the driver's decision.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers=self._headers,
        )
        try:
            async with self._session.get(f"{self._base}/v1/models") as response:
                status, body = response.status, await response.text()
        except _NO_ANSWER as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InvalidSettingError(
                f"The server {self._base} cannot be reached ({reason}): start it or correct the address."
            ) from error
        if status in (401, 403):
            raise InvalidSettingError(f"{self._base} refuses the API key (HTTP {status}); set --api-key.")
        if status != 200:
            raise InvalidSettingError(f"{self._base} is no model server: it answers /v1/models with HTTP {status}.")
        try:
            models = [model["id"] for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidSettingError(f"{self._base} is no model server: it does not list its models.") from error
        if not models or (self._model is not None and self._model not in models):
            raise InvalidSettingError(f"The server {self._base} serves {models}, not the model {self._model!r}.")
        self._model = self._model or models[0]

    async def send(self, prompt_token_ids: list[int], user_id: str | None, history_len: int) -> Outcome:
        """See Target.send. An answer that breaks off, an error inside the stream and a timeout are failures."""
        if self._session is None:
            raise RuntimeError("HttpTarget.send() before start()")
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt_token_ids,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,  # so that every request generates the same number of tokens
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if user_id is not None:
            body["kv_transfer_params"] = {"user_id": user_id, "history_len": history_len}
        started = time.perf_counter()
        try:
            async with self._session.post(f"{self._base}/v1/completions", json=body) as response:
                if response.status != 200:
                    reason = _message(await response.text())
                    return Outcome.failure(
                        f"HTTP {response.status}: {reason}", time.perf_counter() - started, response.status
                    )
                return await _read_stream(response, started)
        except TimeoutError:
            return Outcome.failure(f"no full answer within {self._timeout_s:g} s", time.perf_counter() - started)
        except (*_NO_ANSWER, ValueError) as error:  # ValueError: no JSON, or an endless line, in the stream
            return Outcome.failure(f"{type(error).__name__}: {error}", time.perf_counter() - started)

    async def metrics(self) -> list[Metric] | None:
        """See Target.metrics. Reads ``GET {server}/metrics``."""
        if self._session is None:
            raise RuntimeError("HttpTarget.metrics() before start()")
        try:
            async with self._session.get(f"{self._base}/metrics") as response:
                if response.status != 200:
                    return None
                page = await response.text()
            # The page has thousands of lines, and a proxy's page may be no metrics at all.
            ours = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(ENGINE_PREFIXES))
            return list(text_string_to_metric_families(ours))
        except (*_NO_ANSWER, ValueError):  # ValueError: a line that only looks like ours
            return None

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()


async def _read_stream(response: aiohttp.ClientResponse, started: float) -> Outcome:
    ttft: float | None = None
    usage: dict[str, Any] = {}
    async for data in _server_sent(response):
        if data == "[DONE]":
            latency = time.perf_counter() - started
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            return Outcome(True, None, usage.get("prompt_tokens", 0), cached, ttft, latency, response.status)
        chunk = json.loads(data)
        if "error" in chunk:
            return Outcome.failure(_message(data), time.perf_counter() - started, response.status)
        if chunk.get("choices") and ttft is None:
            ttft = time.perf_counter() - started
        usage = chunk.get("usage") or usage
    return Outcome.failure("the answer broke off", time.perf_counter() - started, response.status)


async def _server_sent(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for raw in response.content:
        line = raw.decode().strip()
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _message(body: str) -> str:
    """The message inside an error answer, or the answer itself, in one line."""
    text = body
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None  # a proxy's HTML page, for example: shown as it is
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return " ".join(text.split())[:300]
