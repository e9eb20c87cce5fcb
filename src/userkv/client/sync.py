"""The client for programs without an event loop."""

import time
from types import TracebackType
from typing import Self

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ReadTimeoutError

from userkv.client.errors import RankConnectionError, RankTimeoutError
from userkv.client.exchange import Exchange, Items, rank_request, reason
from userkv.client.retry import RETRIED_STATUSES, RetryPolicy
from userkv.client.wire import RankInfo, RankRequest, RankResult

CONNECTIONS = 32
"""Kept open at most; more threads than that at once open further ones for a single request."""


class RankClient:
    """Ranks candidates on a UserKV server.

    Thread-safe; keeps its connections open between requests, so make one and keep it::

        with RankClient("http://127.0.0.1:8000") as client:
            result = client.rank("user-1", history=[17, 4, 256], candidates=[31, 5, 99], top_k=2)
            print(result.ranking)

    Args:
        server: address of the server; a ``/v1`` at its end is fine.
        model: name of the model; ``None``: the one that the server has.
        api_key: what the server was given as ``--api-key``.
        timeout_s: seconds to wait, for the connection and then for each part of the answer.
        retry: when to try again.

    Raises:
        InvalidSettingError: an argument cannot be used.

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
        self._session = requests.Session()
        self._session.headers.update(self._exchange.headers)
        # Without this, requests overwrites our Authorization with what ~/.netrc has for the host.
        self._session.auth = _leave_alone
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=CONNECTIONS))

    def rank(
        self,
        user_id: str,
        history: Items,
        candidates: Items,
        *,
        top_k: int | None = None,
        weights_version: str | None = None,
        model: str | None = None,
    ) -> RankResult:
        """Score candidates for a user.

        Args:
            user_id: whose history it is.
            history: his items, oldest first.
            candidates: items to score, at least one.
            top_k: length of the ranking; ``None``: all.
            weights_version: refuse if the server has other weights.
            model: in place of the client's.

        Raises:
            RankError: there is no answer; the subclass says why.

        """
        return self.send(rank_request(user_id, history, candidates, top_k, weights_version, model))

    def prefill(
        self, user_id: str, history: Items, *, weights_version: str | None = None, model: str | None = None
    ) -> RankResult:
        """Have a user's history computed and kept, so that his next :meth:`rank` is fast. There are no scores.

        Raises:
            RankError: there is no answer; the subclass says why.

        """
        return self.send(rank_request(user_id, history, [], None, weights_version, model, "prefill"))

    def send(self, request: RankRequest) -> RankResult:
        """Send a request as it is.

        Raises:
            RankError: there is no answer; the subclass says why.

        """
        return self._exchange.result(request, *self._ask("POST", self._exchange.body(request)))

    def info(self) -> RankInfo:
        """What the served model takes.

        Raises:
            RankError: there is no answer, or the served model is no ranking model.

        """
        return self._exchange.info(*self._ask("GET", None))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, body: bytes | None) -> tuple[int, bytes]:
        attempt = 0
        while True:
            failure, retry_after = None, None
            try:
                response = self._attempt(method, body)
                if response.status_code not in RETRIED_STATUSES:
                    return response.status_code, response.content
                retry_after = response.headers.get("Retry-After")
            except RankConnectionError as error:
                failure = error
            wait = self._exchange.retry.wait_s(attempt, retry_after)
            if wait is None:
                if failure is not None:
                    raise failure
                return response.status_code, response.content
            time.sleep(wait)
            attempt += 1

    def _attempt(self, method: str, body: bytes | None) -> requests.Response:
        url, seconds = self._exchange.url, self._exchange.timeout_s
        try:
            return self._session.request(method, url, data=body, timeout=seconds, allow_redirects=False)
        except requests.ConnectTimeout as error:
            raise self._exchange.unreachable(f"no connection in {seconds:g} s") from error
        except requests.Timeout as error:
            raise RankTimeoutError(f"{url} did not answer in {seconds:g} s") from error
        except requests.ConnectionError as error:
            if _is_timeout(error):  # In the middle of the answer, requests calls it a broken connection.
                raise RankTimeoutError(f"{url} did not answer in {seconds:g} s") from error
            raise self._exchange.unreachable(reason(error)) from error
        except requests.RequestException as error:
            raise self._exchange.unreachable(reason(error)) from error


def _is_timeout(error: requests.ConnectionError) -> bool:
    return any(isinstance(cause, ReadTimeoutError) for cause in error.args)


def _leave_alone(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request
