"""Traces for simulations."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.suite.policies import sim_requests
from benchmarks.suite.scenarios import SCENARIOS, sizes_of

from tests.support.names import StableName
from userkv.core.tokens import as_tokens
from userkv.sim.trace import SimRequest


def sim_request(user: str, history: Sequence[int], new_tokens: int = 1) -> SimRequest:
    """One request of a user whose hash does not change."""
    return SimRequest(StableName(user), as_tokens(history), new_tokens)


def trace_of(scenario: str, requests: int) -> tuple[list[SimRequest], int]:
    """The first requests of one of the suite's scenarios, and how many KV blocks HBM has for them."""
    made = next(each for each in SCENARIOS if each.name == scenario)
    work = list(made.make(Path("no logs"), requests))
    trace = [SimRequest(StableName(each.user), each.history, each.new_tokens) for each in sim_requests(work)]
    return trace, sizes_of(made, work).hbm_blocks - 1
