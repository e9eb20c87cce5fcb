"""What a ranking client raises."""

from userkv.core.errors import UserKVError


class RankError(UserKVError):
    """A request was not answered. The subclasses say why; each message is one sentence.

    Attributes:
        message: what went wrong, in the server's words if it answered.
        status: HTTP status of the answer; ``None`` without one.
        param: the field that is wrong, if the server names it.

    """

    def __init__(self, message: str, status: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param


class RankConnectionError(RankError):
    """The server cannot be reached, or hung up. Tried again before it is raised."""


class RankTimeoutError(RankError):
    """There was no answer in time. Not tried again: the server may be at work on the request still."""


class RankRequestError(RankError):
    """The server refuses the request (4xx): change it."""


class RankAuthError(RankRequestError):
    """The API key is missing or wrong (401, 403)."""


class RankConflictError(RankRequestError):
    """The server has another version of the weights than the request names (409)."""


class RankServerError(RankError):
    """The server failed (5xx), or is too busy (429). Where it may pass (429, 502, 503, 504), tried again before."""


class RankAnswerError(RankError):
    """The answer is none of ``/v1/rank``: something else listens at this address."""
