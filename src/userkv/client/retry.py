"""When a ranking client tries again, and how long it waits before."""

import random
from dataclasses import dataclass

from userkv.core.errors import InvalidSettingError

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
"""Answers that another attempt may change. Ranking is idempotent, so an attempt that did its work does no harm."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast.

    Attributes:
        retries: attempts after the first one.
        first_wait_s: seconds before the first retry; doubled for each further one, and each time only a random part of
            it (at least half) is waited, so that clients that failed together do not come back together.
        longest_wait_s: upper limit of a wait, also of one that the server asks for with ``Retry-After``.

    """

    retries: int = 3
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if type(self.retries) is not int or self.retries < 0:
            raise InvalidSettingError(f"retries must be a whole number of 0 or more, not {self.retries!r}")
        if not 0 <= self.first_wait_s <= self.longest_wait_s < float("inf"):
            raise InvalidSettingError(
                f"waits must be 0 <= first_wait_s <= longest_wait_s, not {self.first_wait_s!r} and "
                f"{self.longest_wait_s!r}"
            )

    def wait_s(self, attempt: int, retry_after: str | None = None) -> float | None:
        """Seconds to wait after the failed attempt number ``attempt`` (from 0); ``None``: give up.

        ``retry_after`` is the header of the answer. Only seconds are understood, as vLLM sends them; a date is ignored.
        """
        if attempt >= self.retries:
            return None
        wait = self.first_wait_s * 2.0 ** min(attempt, 32) * random.uniform(0.5, 1)
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
            wait = max(wait, float(retry_after[:9]))
        return min(self.longest_wait_s, wait)
