"""What simulations are fed with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from userkv.core.tokens import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """A request.

    Attributes:
        user: who; equal names are the same user.
        history: his history's tokens, int32, read-only.
        new_tokens: tokens behind it that nobody sends again: candidates.

    """

    user: str
    history: TokenArray
    new_tokens: int


@dataclass(frozen=True, slots=True)
class SimResult:
    """What came out, in tokens of all requests together.

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
    """Take all requests, one after the other; ``serve`` tells how many tokens of one were not computed."""
    prompt = hits = 0
    for request in requests:
        prompt += len(request.history) + request.new_tokens
        hits += serve(request)
    return SimResult(prompt, hits)
