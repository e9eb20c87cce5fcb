"""Requests one at a time through the oracle's engine: how many tokens of each were cached."""

from collections.abc import Sequence
from itertools import count

from tests.support.oracle import OracleEngine
from userkv.sim.trace import SimRequest

ANSWER_TOKENS = 5
"""Tokens of the oracle's answers are smaller than this; fresh tokens are not, so that nobody sends one twice."""


class SequentialEngine:
    """vLLM's scheduler, block pool and UserKV, as a simulation is called.

    Args:
        num_blocks: blocks that requests can have; vLLM has one more, which it gives to nobody.
        named: name the user of each request.

    """

    def __init__(self, num_blocks: int, named: bool) -> None:
        self.engine = OracleEngine(num_blocks + 1, async_scheduling=False)
        self._named = named
        self._fresh = count(ANSWER_TOKENS)

    def request(self, request: SimRequest) -> int:
        """Run a request to its end."""
        history: Sequence[int] = request.history.tolist()
        prompt = [*history, *(next(self._fresh) for _ in range(request.new_tokens))]
        user = {"user_id": request.user, "history_len": len(history)} if self._named else None
        request_id = self.engine.add(prompt, 1, user)
        self.engine.drain()
        return self.engine.cached[request_id]
