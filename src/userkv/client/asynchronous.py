"""The client for programs with an event loop."""

import asyncio
from types import TracebackType
from typing import Self

import aiohttp

from userkv.client.errors import RankConnectionError, RankTimeoutError
from userkv.client.exchange import Exchange, Items, rank_request, reason
from userkv.client.retry import RETRIED_STATUSES, RetryPolicy
from userkv.client.wire import RankInfo, RankRequest, RankResult


class AsyncRankClient:
    """:class:`~userkv.client.RankClient` for asyncio; see there.

    Any number of requests may run at once, on one event loop. A request that is cancelled is cancelled on the server
    too. ``timeout_s`` is for the whole of an attempt here.
    """

    def __init__(
        self,
        server: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._exchange = Exchange(server, model, api_key, timeout_s, retry)
        self._session: aiohttp.ClientSession | None = None

    async def rank(
        self,
        user_id: str,
        history: Items,
        candidates: Items,
        *,
        top_k: int | None = None,
        weights_version: str | None = None,
        model: str | None = None,
    ) -> RankResult:
        """Score candidates for a user: see :meth:`RankClient.rank <userkv.client.RankClient.rank>`.

        Raises:
            RankError: there is no answer; the subclass says why.

        """
        return await self.send(rank_request(user_id, history, candidates, top_k, weights_version, model))

    async def prefill(
        self, user_id: str, history: Items, *, weights_version: str | None = None, model: str | None = None
    ) -> RankResult:
        """Have a user's history computed and kept, so that his next :meth:`rank` is fast. There are no scores.

        Raises:
            RankError: there is no answer; the subclass says why.

        """
        return await self.send(rank_request(user_id, history, [], None, weights_version, model, "prefill"))

    async def send(self, request: RankRequest) -> RankResult:
        """Send a request as it is.

        Raises:
            RankError: there is no answer; the subclass says why.

        """
        return self._exchange.result(request, *await self._ask("POST", self._exchange.body(request)))

    async def info(self) -> RankInfo:
        """What the served model takes.

        Raises:
            RankError: there is no answer, or the served model is no ranking model.

        """
        return self._exchange.info(*await self._ask("GET", None))

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:  # Made here, since it needs a running event loop.
            self._session = aiohttp.ClientSession(
                headers=self._exchange.headers,
                connector=aiohttp.TCPConnector(limit=0),  # How many run at once is the caller's decision.
                timeout=aiohttp.ClientTimeout(total=self._exchange.timeout_s),
            )
        return self._session

    async def _ask(self, method: str, body: bytes | None) -> tuple[int, bytes]:
        attempt = 0
        while True:
            failure, retry_after = None, None
            try:
                status, answer, retry_after = await self._attempt(method, body)
                if status not in RETRIED_STATUSES:
                    return status, answer
            except RankConnectionError as error:
                failure = error
            wait = self._exchange.retry.wait_s(attempt, retry_after)
            if wait is None:
                if failure is not None:
                    raise failure
                return status, answer
            await asyncio.sleep(wait)
            attempt += 1

    async def _attempt(self, method: str, body: bytes | None) -> tuple[int, bytes, str | None]:
        url = self._exchange.url
        try:
            async with self._open().request(method, url, data=body, allow_redirects=False) as response:
                return response.status, await response.read(), response.headers.get("Retry-After")
        except TimeoutError as error:
            raise RankTimeoutError(f"{url} did not answer in {self._exchange.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._exchange.unreachable(reason(error)) from error
