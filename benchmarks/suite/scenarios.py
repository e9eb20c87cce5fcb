"""What the suite runs: workloads, and how much memory the systems have for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.suite import workloads
from benchmarks.suite.system import Sizes
from benchmarks.suite.workloads import TOKENS_PER_ITEM
from userkv.core.sizes import MIB
from userkv.logs.work_request import WorkRequest

BLOCK_SIZE = 128
"""vLLM's own on a CPU."""

TOKEN_BYTES = 8192
"""KV of one token of the suite's model."""

HBM_SHARE = 0.25
"""KV blocks of the engine, as a share of what all histories take at the end."""

LEAST_PROMPTS = 4
"""The engine's cache holds at least so many of the longest prompts: below, requests wait for blocks, not for tokens."""

AMPLE = 2048 * MIB

NO_CACHE, APC = ("no-cache",), ("apc",)
PEERS = ("offloading", "mooncake-store-connector", "lmcache")
POOLS = ("userkv-local", "userkv-mooncake", "userkv-layerwise")
EVERYBODY = (*NO_CACHE, *APC, *PEERS, "userkv-hbm", *POOLS)
SOME = (*APC, "offloading", "mooncake-store-connector", "userkv-hbm", "userkv-local")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload, and what runs it.

    Attributes:
        name: for options and JSON.
        title: one line for people.
        make: the requests, given the directory of the logs and how many.
        requests: how many.
        systems: names of the systems.
        pool_bytes: memory of the pools.
        needs_data: reads logs that are not part of the project.
        concurrency: requests at once; ``None`` if each comes at its time.
        fewer: system -> requests, where that is enough: without a cache each request costs the same as the others.

    """

    name: str
    title: str
    make: Callable[[Path, int], Iterator[WorkRequest]]
    requests: int
    systems: tuple[str, ...] = SOME
    pool_bytes: int = AMPLE
    needs_data: bool = False
    concurrency: int | None = 8
    fewer: Mapping[str, int] = field(default_factory=dict)


def _generated(make: Callable[[int], Iterator[WorkRequest]]) -> Callable[[Path, int], Iterator[WorkRequest]]:
    return lambda data, requests: make(requests)


def _anonymous(requests: int) -> Iterator[WorkRequest]:
    for made in workloads.recommender(requests):
        yield WorkRequest(
            made.time, made.user, made.new_items, made.history_items_total, made.candidates, anonymous=True
        )


GR, SMALL, SMALLEST, COLD, ORDINARY = "gr", "gr-512", "gr-256", "cold", "ordinary"
VISITS, SESSIONS = "visits", "sessions"

SCENARIOS = (
    Scenario(
        GR,
        "64 users, stable histories, pool for all",
        _generated(workloads.recommender),
        2000,
        EVERYBODY,
        fewer={"no-cache": 200},
    ),
    Scenario(
        SMALL,
        "the same, pool of 512 MiB (for 63 %)",
        _generated(workloads.recommender),
        2000,
        (*PEERS, "userkv-local", "userkv-mooncake"),
        512 * MIB,
    ),
    Scenario(
        SMALLEST,
        "the same, pool of 256 MiB (for 32 %)",
        _generated(workloads.recommender),
        400,
        (*PEERS, "userkv-local", "userkv-mooncake"),
        256 * MIB,
    ),
    Scenario(
        VISITS,
        "one visit per second",
        _generated(workloads.visits),
        200,
        (*PEERS, "userkv-local"),
        concurrency=None,
    ),
    Scenario(
        SESSIONS,
        "the same visits, histories brought in two seconds ahead",
        _generated(workloads.sessions),
        400,
        (*PEERS, "userkv-local", "userkv-mooncake"),
        concurrency=None,
    ),
    Scenario(
        COLD,
        "every user's first request",
        _generated(workloads.cold),
        120,
        ("apc", "userkv-hbm", "userkv-local", "userkv-mooncake"),
    ),
    Scenario(
        ORDINARY,
        "nobody is named",
        _generated(_anonymous),
        200,
        ("apc", "userkv-hbm", "userkv-local"),
    ),
    Scenario("growing", "histories grow with each request", _generated(workloads.growing), 300),
    Scenario("bursts", "five requests per visit", _generated(workloads.bursts), 300),
    Scenario("drifting", "the most active users change", _generated(workloads.drifting), 300),
    Scenario("published", "sessions as published of a large log", _generated(workloads.published), 200),
    Scenario("candidates", "as many candidates as history", _generated(workloads.candidate_heavy), 150),
    Scenario("mixed", "every second request is an ordinary one", _generated(workloads.mixed), 300),
    Scenario("movielens", "MovieLens, a request for ten ratings", workloads.movielens, 400, needs_data=True),
    Scenario("otto", "OTTO, a request for two events", workloads.otto, 400, needs_data=True),
    Scenario(
        "conversations", "Mooncake's conversation trace, nobody is named", workloads.conversations, 200, needs_data=True
    ),
)
"""In the order in which they run."""

_FEW_USERS = 8

QUICK_SCENARIOS = (
    Scenario(
        GR,
        "8 users, stable histories, pool for all",
        _generated(partial(workloads.recommender, users=_FEW_USERS)),
        32,
        (*NO_CACHE, *APC, "mooncake-store-connector", "userkv-hbm", "userkv-mooncake"),
        fewer={"no-cache": 6},
    ),
    Scenario(
        SMALL,
        "the same, pool of 64 MiB (for 70 %)",
        _generated(partial(workloads.recommender, users=_FEW_USERS)),
        24,
        ("mooncake-store-connector", "userkv-local"),
        64 * MIB,
    ),
    Scenario(
        VISITS,
        "one visit per second",
        _generated(partial(workloads.visits, users=_FEW_USERS)),
        8,
        ("mooncake-store-connector",),
        concurrency=None,
    ),
    Scenario(
        SESSIONS,
        "the same visits, histories brought in two seconds ahead",
        _generated(partial(workloads.sessions, users=_FEW_USERS)),
        16,
        ("userkv-local",),
        concurrency=None,
    ),
    Scenario(COLD, "every user's first request", _generated(workloads.cold), 5, ("apc", "userkv-local")),
    Scenario(ORDINARY, "nobody is named", _generated(_anonymous), 5, ("apc", "userkv-hbm")),
)
"""Each goal once, in ten minutes, most of which engines take to start. So few requests are mostly a user's first or
second: they say that the systems run and roughly how they compare, not what they gain in the long run."""


def sizes_of(scenario: Scenario, requests: Sequence[WorkRequest]) -> Sizes:
    """How much memory the systems have for these requests; what names no user counts only if nothing does."""
    histories: Counter[str] = Counter()
    longest = 0
    nobody_named = all(request.anonymous for request in requests)
    for request in requests:
        length = TOKENS_PER_ITEM * request.history_items_total
        if nobody_named or not request.anonymous:
            histories[request.user] = max(histories[request.user], length)
        longest = max(longest, length + TOKENS_PER_ITEM * len(request.candidates))
    blocks = sum(-(-length // BLOCK_SIZE) for length in histories.values())
    prompt_blocks = -(-(longest + 1) // BLOCK_SIZE)
    return Sizes(
        block_size=BLOCK_SIZE,
        hbm_blocks=max(int(HBM_SHARE * blocks), LEAST_PROMPTS * prompt_blocks) + 1,  # One is vLLM's null block.
        pool_bytes=scenario.pool_bytes,
        token_bytes=TOKEN_BYTES,
        max_model_len=prompt_blocks * BLOCK_SIZE,
    )
