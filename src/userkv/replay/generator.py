"""A seeded generator of workloads with the shape of a large recommender's log.

Published for a generative-recommendation log of 27,285 users and 31 days: history length 8,594 items in the median
and 24,587 at the 90th percentile (taken here as a log-normal distribution); gaps between two events of a user: 82.8 %
under one second, 6.5 % one to five minutes, 0.6 % over two hours. Nothing is published about the other 10.1 %; they
are taken as 8.6 % of one second to one minute and 1.5 % of five minutes to two hours. Inside a class, gaps are
log-uniform. Who issues the next request follows Zipf's law.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from userkv.core.errors import InvalidSettingError
from userkv.logs.work_request import WorkRequest
from userkv.replay.candidates import CandidateSampler
from userkv.replay.workload import GrowingHistory, check_max_history

PUBLISHED_P90_RATIO = 24_587 / 8_594
"""90th percentile of the published history lengths divided by their median."""

GAP_CLASSES = (
    # (share, shortest gap in s, longest gap in s)
    (0.828, 0.01, 1.0),
    (0.086, 1.0, 60.0),
    (0.065, 60.0, 300.0),
    (0.015, 300.0, 7_200.0),
    (0.006, 7_200.0, 43_200.0),
)

_NORMAL_90TH_PERCENTILE = 1.2815515655446004


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """What to generate; raises InvalidSettingError for numbers out of range.

    users: size of the population (not everyone need appear). requests: number of requests. zipf: exponent of the
    users' popularity, 0 for uniform. median_history and p90_ratio: items of a user's history at his first request,
    median and 90th percentile divided by it. max_history: longest history in items; a longer one loses its oldest
    half. growth: mean number of items appended between two requests of a user, at least 1. candidates: (low, high)
    per request. items: number of different items, ids 0 to items - 1
    (candidates may go beyond when a user has seen them all). seed: equal seeds, equal workloads.
    """

    users: int = 200
    requests: int = 1_000
    zipf: float = 1.0
    median_history: int = 512
    p90_ratio: float = PUBLISHED_P90_RATIO
    max_history: int = 4_000
    growth: float = 8.0
    candidates: tuple[int, int] = (32, 64)
    items: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        whole = (("users", self.users), ("requests", self.requests), ("items", self.items))
        for name, count in (*whole, ("median history", self.median_history)):
            if count < 1:
                raise InvalidSettingError(f"The number for {name} must be at least 1, not {count}.")
        if not 0 <= self.zipf <= 10:
            raise InvalidSettingError(f"The Zipf exponent must be 0 to 10, not {self.zipf}.")
        if not 1 <= self.p90_ratio <= 100:
            raise InvalidSettingError(f"The ratio of 90th percentile to median must be 1 to 100, not {self.p90_ratio}.")
        if not 1 <= self.growth <= 10_000:
            raise InvalidSettingError(f"The mean growth per request must be 1 to 10000 items, not {self.growth}.")
        check_max_history(self.max_history, self.median_history)


def generate(settings: GeneratorSettings) -> Iterator[WorkRequest]:
    """Yields the requests in order of time, which starts near 0 and counts seconds."""
    rng = np.random.default_rng(settings.seed)
    sampler = CandidateSampler(np.arange(settings.items), settings.candidates, rng)
    issuer = rng.choice(settings.users, size=settings.requests, p=zipf_shares(settings.users, settings.zipf))
    per_user = np.bincount(issuer, minlength=settings.users)
    growth = 1 + rng.poisson(settings.growth - 1, size=settings.requests)
    times, users, new_counts = _timeline(per_user, growth, rng)
    first_lengths = history_lengths(settings, rng)
    histories: dict[int, GrowingHistory] = {}
    for time, user, new in zip(times.tolist(), users.tolist(), new_counts.tolist(), strict=True):
        if user not in histories:
            histories[user] = GrowingHistory(settings.max_history)
            new = int(first_lengths[user])
        history = histories[user]
        for item in rng.integers(0, settings.items, size=new).tolist():
            history.append(item)
        yield history.request(time, f"u{user}", sampler.draw(history.seen))


def zipf_shares(users: int, exponent: float) -> np.ndarray:
    """The probability that a request comes from user 0, 1, ...: proportional to ``1 / (rank ** exponent)``."""
    weights = np.arange(1, users + 1, dtype=np.float64) ** -exponent
    shares: np.ndarray = weights / weights.sum()
    return shares


def history_lengths(settings: GeneratorSettings, rng: np.random.Generator) -> np.ndarray:
    """Items in each user's history at his first request: log-normal, at least 1 and at most max_history."""
    sigma = math.log(settings.p90_ratio) / _NORMAL_90TH_PERCENTILE
    lengths = rng.lognormal(math.log(settings.median_history), sigma, size=settings.users)
    return np.clip(np.rint(lengths), 1, settings.max_history).astype(np.int64)


def event_gaps(count: int, rng: np.random.Generator) -> np.ndarray:
    """Seconds between consecutive events of a user, by GAP_CLASSES."""
    shares, shortest, longest = (np.array(column) for column in zip(*GAP_CLASSES, strict=True))
    kind = rng.choice(len(GAP_CLASSES), size=count, p=shares)
    low, high = np.log(shortest[kind]), np.log(longest[kind])
    gaps: np.ndarray = np.exp(low + (high - low) * rng.random(count))
    return gaps


def _timeline(
    per_user: np.ndarray, growth: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times, users and numbers of new items of all requests, in order of time.

    Every new item is an event and waits one gap after the one before, so a request comes after a burst, and pauses
    between sessions fall between requests. Users start at random, such that all fit into the busiest one's span.
    """
    gaps = event_gaps(int(growth.sum()), rng)
    ends = np.cumsum(growth)
    elapsed = np.concatenate(([0.0], np.cumsum(gaps)))
    before_request = elapsed[ends] - elapsed[ends - growth]
    users = np.repeat(np.arange(len(per_user)), per_user)
    times = np.empty(len(growth))
    bounds = np.concatenate(([0], np.cumsum(per_user)))
    own_times = [np.cumsum(before_request[start:end]) for start, end in itertools.pairwise(bounds)]
    span = max(float(own[-1]) for own in own_times if len(own))
    for start, own in zip(bounds[:-1], own_times, strict=True):
        if len(own):
            times[start : start + len(own)] = own + rng.uniform(0, span - own[-1])
    order = np.argsort(times, kind="stable")
    return np.round(times[order], 3), users[order], growth[order]
