"""Requests of a simulation, and its result."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from userkv.core.tokens import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """A request.

    Attributes:
        user: name of the user.
        history: tokens of the history, int32, read-only.
        new_tokens: tokens behind it that are not sent again: candidates.

    """

    user: str
    history: TokenArray
    new_tokens: int


@dataclass(frozen=True, slots=True)
class SimResult:
    """Totals over all requests, in tokens.

    Attributes:
        prompt_tokens: histories and candidates.
        hit_tokens: those that were not computed.

    """

    prompt_tokens: int
    hit_tokens: int

    @property
    def hit_ratio(self) -> float:
        """Tokens that were not computed, as a share of all."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def run_through(requests: Iterable[SimRequest], serve: Callable[[SimRequest], int]) -> SimResult:
    """Take all requests, one after the other; ``serve`` returns how many tokens of one were not computed."""
    prompt = hits = 0
    for request in requests:
        prompt += len(request.history) + request.new_tokens
        hits += serve(request)
    return SimResult(prompt, hits)
