"""One request and its answer, as bytes: what both clients share."""

import json
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from userkv.client.errors import (
    RankAnswerError,
    RankAuthError,
    RankConflictError,
    RankConnectionError,
    RankError,
    RankRequestError,
    RankServerError,
)
from userkv.client.retry import RetryPolicy
from userkv.client.wire import RankInfo, RankRequest, RankResult
from userkv.core.errors import InvalidSettingError

Items = Sequence[int | Sequence[int]]
"""Items of a request; arrays of numpy will do too."""

PATH = "/v1/rank"

T = TypeVar("T")


class Exchange:
    """How one server is asked. Thread-safe: nothing changes.

    Raises:
        InvalidSettingError: an argument cannot be used.

    Attributes:
        url: of the endpoint.
        headers: of every request.
        timeout_s: seconds to wait.
        retry: when to try again.

    """

    def __init__(
        self, server: str, model: str | None, api_key: str | None, timeout_s: float, retry: RetryPolicy | None
    ) -> None:
        if not timeout_s > 0:
            raise InvalidSettingError(f"timeout_s must be more than 0, not {timeout_s!r}")
        base = server.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise InvalidSettingError(f"the server's address must start with http:// or https://, not {server!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidSettingError("the API key must be printable ASCII, as a header is")
        self.url = base + PATH
        self.timeout_s = timeout_s
        self.retry = RetryPolicy() if retry is None else retry
        self._model = model
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def body(self, request: RankRequest) -> bytes:
        """A request as JSON, with this client's model unless it names one.

        Raises:
            TypeError: an item is neither a number nor a list of numbers.
            RankRequestError: a text is not valid Unicode.

        """
        if request.model is None and self._model is not None:
            request = msgspec.structs.replace(request, model=self._model)
        try:
            return msgspec.json.encode(request, enc_hook=_plain)
        except UnicodeEncodeError as error:
            raise RankRequestError("a text of the request is not valid Unicode; remove lone surrogates") from error

    def result(self, request: RankRequest, status: int, answer: bytes) -> RankResult:
        """The answer to a request.

        Raises:
            RankError: it is an error, or not what was asked for.

        """
        result = self._decoded(RankResult, status, answer)
        wanted = 0 if request.stage == "prefill" else len(request.candidates)
        if len(result.scores) != wanted:
            raise RankAnswerError(
                f"{self.url} answers {len(result.scores)} scores for {wanted} candidates; correct the address",
                status,
            )
        return result

    def info(self, status: int, answer: bytes) -> RankInfo:
        """The answer to ``GET /v1/rank``.

        Raises:
            RankError: it is an error, or not what was asked for.

        """
        return self._decoded(RankInfo, status, answer)

    def _decoded(self, kind: type[T], status: int, answer: bytes) -> T:
        if status != 200:
            raise self.refusal(status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RankAnswerError(
                f"{self.url} does not answer as a ranking server does ({error}); correct the address", status
            ) from None

    def unreachable(self, reason: str) -> RankConnectionError:
        """The error of a connection that failed."""
        return RankConnectionError(f"{self.url} cannot be reached ({reason}); start the server or correct the address")

    def refusal(self, status: int, answer: bytes) -> RankError:
        """The error of an answer whose status is not 200."""
        message, param = _explanation(answer)
        text = message or f"{self.url} answers with HTTP {status}"
        if status in (401, 403):
            return RankAuthError(f"the server refuses the API key (HTTP {status}): {text}", status, param)
        if status == 409:
            return RankConflictError(text, status, param)
        if status == 429 or status >= 500:
            return RankServerError(text, status, param)
        if 400 <= status < 500:
            return RankRequestError(text, status, param)
        return RankAnswerError(f"{self.url} answers with HTTP {status}; correct the address", status)


def rank_request(
    user_id: str,
    history: Items,
    candidates: Items,
    top_k: int | None = None,
    weights_version: str | None = None,
    model: str | None = None,
    stage: str = "rank",
) -> RankRequest:
    """A request from what a caller has: sequences and arrays of any kind."""
    return RankRequest(
        user_id=user_id,
        history=_listed(history),
        candidates=_listed(candidates),
        top_k=top_k,
        weights_version=weights_version,
        model=model,
        stage=stage,
    )


def reason(error: BaseException) -> str:
    """The innermost cause of a failed connection, which is what the libraries' long messages are about."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return " ".join(str(error).split())[:200] or type(error).__name__


def _listed(items: Any) -> list[Any]:
    # Arrays of numpy and tensors turn themselves into lists faster than anybody else can.
    listed = items.tolist() if hasattr(items, "tolist") else list(items)
    if not isinstance(listed, list):
        raise TypeError(f"items must be a sequence, not {type(items).__name__}")
    return listed


def _plain(value: Any) -> Any:
    """What JSON has for a value that it does not know: a number of numpy, or an array (a semantic id)."""
    return value.tolist() if hasattr(value, "tolist") else operator.index(value)


def _explanation(answer: bytes) -> tuple[str, str | None]:
    """Message and field of an error in OpenAI's format, or in whatever format a proxy has, in one line."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return " ".join(answer.decode(errors="replace").split())[:200], None
    inner = found.get("error", found) if isinstance(found, Mapping) else found
    if not isinstance(inner, Mapping):
        return " ".join(str(inner).split())[:300], None
    param = inner.get("param")
    message = inner.get("message", inner.get("detail", inner))
    return " ".join(str(message).split())[:600], param if isinstance(param, str) else None
