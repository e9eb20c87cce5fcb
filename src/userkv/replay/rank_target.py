"""A server that ranks, as ``userkv serve`` with a ranking model: the replay's requests go to ``/v1/rank``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from prometheus_client.metrics_core import Metric

from userkv.client import AsyncRankClient, RankError, RankInfo, RetryPolicy
from userkv.core.errors import InvalidSettingError
from userkv.ranking.item_codec import ItemCodec
from userkv.replay.http_target import HttpTarget
from userkv.replay.target import Outcome

_ONCE = RetryPolicy(retries=0)
_PROBE_SECONDS = 10.0

CATALOGUE = ItemCodec(base=2**62, digits=1, reserved=0)
"""Stands in for a catalogue, which only the server has: an item is a token of its own."""


async def find_ranking_model(server: str, timeout_s: float, api_key: str | None = None) -> RankInfo | None:
    """What the server's ranking model takes; None if it has none, is not there or is no server of ours."""
    timeout_s = min(timeout_s, _PROBE_SECONDS)
    async with AsyncRankClient(server, api_key=api_key, timeout_s=timeout_s, retry=_ONCE) as client:
        try:
            return await client.info()
        except RankError:
            return None


def codec_of(info: RankInfo) -> ItemCodec:
    """How the replay's items become tokens so that there are as many of them as in the server.

    CATALOGUE if only the server knows the tokens. Raises InvalidSettingError if the server's items are of a kind that
    is not known here.
    """
    items = info.items
    if items.get("kind") == "table":
        return CATALOGUE
    try:
        return ItemCodec(int(items["base"]), int(items["digits"]), int(items["reserved"]))
    except (KeyError, ValueError) as error:
        raise InvalidSettingError(
            f"The server's items are of kind {items.get('kind')!r}: give --digits and --vocab-size."
        ) from error


class RankTarget:
    """Sends requests to ``POST {server}/v1/rank``. A ranking has no first token: its time to it is its latency.

    server, model, timeout_s, api_key: as for HttpTarget. codec: what the prompts are made with; items are sent as lists
    of its tokens, and as item ids if it is CATALOGUE.
    """

    def __init__(
        self, server: str, codec: ItemCodec, *, model: str | None, timeout_s: float, api_key: str | None = None
    ) -> None:
        self._pages = HttpTarget(server, model=model, timeout_s=timeout_s, api_key=api_key)
        self._client = AsyncRankClient(server, model=model, timeout_s=timeout_s, api_key=api_key, retry=_ONCE)
        self._codec = codec
        self._nobody = f"userkv-replay-{uuid.uuid4().hex}"

    async def start(self) -> None:
        """Connects. Raises InvalidSettingError if the server is not there or does not know the model."""
        await self._pages.start()

    async def send(self, prompt_token_ids: list[int], user_id: str | None, history_len: int) -> Outcome:
        """See Target.send. A request of no user must have no history, since /v1/rank would keep it."""
        if user_id is None:
            assert history_len == 0
            user_id = self._nobody
        history, candidates = self._items(prompt_token_ids[:history_len]), self._items(prompt_token_ids[history_len:])
        started = time.perf_counter()
        try:
            result = await self._client.rank(user_id, history, candidates)
        except RankError as error:
            message = f"HTTP {error.status}: {error.message}" if error.status is not None else error.message
            return Outcome.failure(message, time.perf_counter() - started, error.status)
        latency = time.perf_counter() - started
        usage = result.usage
        tokens = usage.history_tokens + usage.candidate_tokens
        return Outcome(True, None, tokens, usage.cached_tokens.total, latency, latency, 200)

    async def metrics(self) -> list[Metric] | None:
        """See Target.metrics."""
        return await self._pages.metrics()

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()
        await self._pages.close()

    def _items(self, tokens: list[int]) -> Sequence[int] | list[list[int]]:
        if self._codec is CATALOGUE:
            return tokens
        width = self._codec.tokens_per_item
        return [tokens[at : at + width] for at in range(0, len(tokens), width)]
