"""The Python client of ``/v1/rank``. It needs neither vLLM nor torch.

Rooms that it may import: ``core``.
Of the watched libraries: ``aiohttp``, ``requests``.
Start here: ``sync.py`` (the client), ``wire.py`` (what is sent and answered), ``exchange.py``.
"""

from userkv.client.asynchronous import AsyncRankClient
from userkv.client.errors import (
    RankAnswerError,
    RankAuthError,
    RankConflictError,
    RankConnectionError,
    RankError,
    RankRequestError,
    RankServerError,
    RankTimeoutError,
)
from userkv.client.retry import RetryPolicy
from userkv.client.sync import RankClient
from userkv.client.wire import CachedTokens, Item, RankInfo, RankRequest, RankResult, Score, Timing, Usage

__all__ = [
    "AsyncRankClient",
    "CachedTokens",
    "Item",
    "RankAnswerError",
    "RankAuthError",
    "RankClient",
    "RankConflictError",
    "RankConnectionError",
    "RankError",
    "RankInfo",
    "RankRequest",
    "RankRequestError",
    "RankResult",
    "RankServerError",
    "RankTimeoutError",
    "RetryPolicy",
    "Score",
    "Timing",
    "Usage",
]
