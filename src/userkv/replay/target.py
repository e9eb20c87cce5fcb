"""What a workload is replayed against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went.

    ok: answered in full. error: one line that says why not. prompt_tokens: as counted by the target (0 if it failed).
    cached_tokens: prompt tokens that did not have to be computed; None if the target does not tell. ttft_s: seconds
    to the first token, None if none came. latency_s: seconds to the end of the answer. status: HTTP status, None if
    there was no HTTP answer.
    """

    ok: bool
    error: str | None
    prompt_tokens: int
    cached_tokens: int | None
    ttft_s: float | None
    latency_s: float
    status: int | None

    @classmethod
    def failure(cls, error: str, latency_s: float, status: int | None = None) -> Outcome:
        """A request that was not answered in full."""
        return cls(False, error, 0, None, None, latency_s, status)


class Target(Protocol):
    """A model server or engine. Use: ``await start()``, any number of ``send``, ``await close()`` in any case."""

    async def start(self) -> None:
        """Gets ready. Raises InvalidSettingError if the target cannot be reached or started."""

    async def send(self, prompt_token_ids: list[int], user_id: str | None, history_len: int) -> Outcome:
        """Sends one request; whatever goes wrong with it is an Outcome, not an exception.

        user_id: whose history the first ``history_len`` tokens of the prompt are; None: no user is named.
        """

    async def metrics(self) -> list[Metric] | None:
        """What the target counts of all requests so far, at least all of ``readings.ENGINE_PREFIXES`` that it has.

        None if it cannot be asked. The latest requests may be missing until the target has run one more.
        """

    async def close(self) -> None:
        """Frees everything that start() took."""
