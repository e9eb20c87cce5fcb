"""The routes of ``/v1/rank``: JSON in, JSON or an error in OpenAI's format out."""

import time
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.logger import init_logger

from userkv.client.exchange import PATH
from userkv.client.request import BadFieldError, parse_request
from userkv.client.wire import ErrorAnswer, ErrorDetail, RankInfo, RankRequest, RankResult
from userkv.core.errors import UserKVError
from userkv.serving.rank.openapi import body_of, json_of
from userkv.serving.rank.scoring import LostScoresError
from userkv.serving.rank.service import RankService, UnknownModelError, WeightsConflictError

logger = init_logger(__name__)

STATE = "userkv_rank"
"""Attribute of the application's state: a :class:`RankService`, or a sentence that says why there is none."""

_LONGEST_MESSAGE = 600
_STATUSES: dict[type[Exception], HTTPStatus] = {
    UnknownModelError: HTTPStatus.NOT_FOUND,
    WeightsConflictError: HTTPStatus.CONFLICT,
    LostScoresError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "UnsupportedMediaTypeError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is missing, unknown or wrong, an item is unknown, or the request is too long."},
    404: {"description": "There is no such model."},
    409: {"description": "The server has another version of the weights than the request names."},
    415: {"description": "The body is not JSON by its Content-Type."},
    500: {"description": "The engine failed. There are never scores of only some candidates."},
    501: {"description": "The served model is no ranking model."},
    503: {"description": "The server is too busy, or about to end; try again."},
}

router = APIRouter(tags=["UserKV"])


@router.post(
    PATH,
    summary="Score a user's candidates in one pass",
    description="Scores all candidates in one forward pass after the user's history, of which only what is new has to "
    "be computed. A candidate's score depends on neither the other candidates nor their order.",
    openapi_extra={"requestBody": body_of(RankRequest)},
    responses={
        200: json_of(RankResult, "The scores."),
        401: {"description": "The API key is missing or wrong. (vLLM's own answer, in its format.)"},
        **{code: _ERRORS[code] | json_of(ErrorAnswer) for code in _ERRORS},
    },
    response_class=Response,
)
async def rank(raw_request: Request) -> Response:
    """Answer one request."""
    service = _service(raw_request)
    if isinstance(service, str):
        return error_answer(HTTPStatus.NOT_IMPLEMENTED, service)
    kind = raw_request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A browser sends other types to any address without asking there.
        sentence = f"the Content-Type must be application/json, not {kind[:80] or 'none'}"
        return error_answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence)
    body = await raw_request.body()
    answer = await _ranked(service, raw_request=raw_request, body=body, arrived=time.perf_counter())
    return Response(status_code=499) if answer is None else answer  # The client has gone; nobody reads this.


@router.get(
    PATH,
    summary="What the served ranking model takes",
    responses={200: json_of(RankInfo, "The model."), 501: _ERRORS[501] | json_of(ErrorAnswer)},
    response_class=Response,
)
async def describe(raw_request: Request) -> Response:
    """Describe the model."""
    service = _service(raw_request)
    if isinstance(service, str):
        return error_answer(HTTPStatus.NOT_IMPLEMENTED, service)
    return _json(HTTPStatus.OK, await service.info())


@with_cancellation
@load_aware_call
async def _ranked(service: RankService, *, raw_request: Request, body: bytes, arrived: float) -> Response:
    try:
        answer = await service.rank(parse_request(body), raw_request.headers.get("X-Request-Id"), arrived)
        return _json(HTTPStatus.OK, answer)
    except (UserKVError, LostScoresError) as error:
        status = _STATUSES.get(type(error), HTTPStatus.BAD_REQUEST)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("%s: %s", PATH, error)
        return error_answer(status, str(error), error.param if isinstance(error, BadFieldError) else None)


def error_answer(status: HTTPStatus, message: str, param: str | None = None) -> Response:
    """An error in OpenAI's format."""
    if len(message) > _LONGEST_MESSAGE:  # It may quote the request.
        message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 2 :]}"
    return _json(status, ErrorAnswer(ErrorDetail(message, _TYPES[status], status.value, param)))


def _service(raw_request: Request) -> RankService | str:
    service: RankService | str = getattr(raw_request.app.state, STATE, "this server is not ready to rank")
    return service


def _json(status: HTTPStatus, content: Any) -> Response:
    # Not by way of FastAPI's models: they would take longer than the rest of the endpoint together.
    return Response(msgspec.json.encode(content), status, media_type="application/json")
