"""The suite's workloads: requests in order, made by seed or from logs.

Histories are of items of two tokens. All generators are deterministic: equal arguments, equal requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from userkv.core.errors import InvalidSettingError
from userkv.logs.formats import read_events
from userkv.logs.work_request import WorkRequest
from userkv.replay.candidates import CandidateSampler
from userkv.replay.generator import GeneratorSettings, generate, zipf_shares
from userkv.replay.workload import GrowingHistory, build_requests

ITEMS = 100_000
TOKENS_PER_ITEM = 2

USERS = 64
SHORTEST, LONGEST = 512, 1024
"""Items of the users' histories: 1,024 to 2,048 tokens."""

CANDIDATES = (64, 128)

VISITS_PER_SECOND = 1.0
"""Where requests have times. An engine of two cores computes one and a half cold prompts per second."""

AHEAD_SECONDS = 2.0
"""From the start of a session to its ranking request."""

TRACE_ITEMS = 64
"""Items for one hash of the conversation trace. It stands for 512 tokens there and for 128 here, one KV block, so that
the shape of the sharing stays and a CPU can compute the prompts."""

TRACE_HASHES = 24
"""Longest prompt taken from the trace, in hashes; longer ones are left out."""


class Crowd:
    """Users with histories of their own, from a seed.

    Args:
        seed: of histories and candidates.
        candidates: per request, least and most.

    """

    def __init__(self, seed: int, candidates: tuple[int, int] = CANDIDATES) -> None:
        self.rng = np.random.default_rng(seed)
        self._sampler = CandidateSampler(np.arange(ITEMS), candidates, self.rng)
        self._histories: dict[str, GrowingHistory] = {}
        self._count = 0

    def request(self, user: str, first: int, growth: int = 0, ranks: bool = True) -> WorkRequest:
        """The user's next request: ``first`` items at the first one, ``growth`` more at each further one.

        ranks: has candidates; otherwise it only brings the history in.
        """
        history = self._histories.get(user)
        if history is None:
            history, growth = GrowingHistory(None), first
            self._histories[user] = history
        for item in self.rng.integers(0, ITEMS, size=growth).tolist():
            history.append(item)
        self._count += 1
        candidates = self._sampler.draw(history.seen) if ranks else ()
        return history.request(float(self._count), user, candidates)

    def lengths(self, users: int) -> Sequence[int]:
        """A length for each user's history, in items."""
        lengths: Sequence[int] = self.rng.integers(SHORTEST, LONGEST, size=users, endpoint=True).tolist()
        return lengths

    def visitors(self, users: int, visits: int, zipf: float) -> Sequence[int]:
        """Who comes, by Zipf's law."""
        who: Sequence[int] = self.rng.choice(users, size=visits, p=zipf_shares(users, zipf)).tolist()
        return who


def recommender(requests: int, candidates: tuple[int, int] = CANDIDATES, users: int = USERS) -> Iterator[WorkRequest]:
    """Users whose histories do not change; some are more active than others."""
    crowd = Crowd(0, candidates)
    lengths = crowd.lengths(users)
    for user in crowd.visitors(users, requests, 0.8):
        yield crowd.request(f"u{user}", lengths[user])


def candidate_heavy(requests: int) -> Iterator[WorkRequest]:
    """The same with as many candidates as items in a history of middle length."""
    return recommender(requests, (SHORTEST, LONGEST))


def visits(requests: int, users: int = USERS) -> Iterator[WorkRequest]:
    """The same at their times: independent visits, one ranking request each."""
    return _at_their_times(requests, users, prefetched=False)


def sessions(requests: int, users: int = USERS) -> Iterator[WorkRequest]:
    """The same visits, each ranking request preceded by one that only brings the history in: a session starts."""
    return _at_their_times((requests + 1) // 2, users, prefetched=True)


def _at_their_times(number: int, users: int, prefetched: bool) -> Iterator[WorkRequest]:
    crowd = Crowd(0)
    lengths = crowd.lengths(users)
    who = crowd.visitors(users, number, 0.8)
    starts = np.cumsum(crowd.rng.exponential(1 / VISITS_PER_SECOND, number)).tolist()
    events = [(start + AHEAD_SECONDS, user, True) for start, user in zip(starts, who, strict=True)]
    if prefetched:
        events += [(start, user, False) for start, user in zip(starts, who, strict=True)]
    for time, user, ranks in sorted(events):
        yield replace(crowd.request(f"u{user}", lengths[user], ranks=ranks), time=time)


def growing(requests: int) -> Iterator[WorkRequest]:
    """Histories grow by 16 items from one request to the next."""
    crowd = Crowd(1)
    lengths = crowd.lengths(USERS)
    for user in crowd.visitors(USERS, requests, 0.8):
        yield crowd.request(f"u{user}", lengths[user] // 2, growth=16)


def bursts(requests: int) -> Iterator[WorkRequest]:
    """Each visit of a user is five requests one after the other, and histories grow by 4 items between them."""
    crowd = Crowd(2)
    lengths = crowd.lengths(USERS)
    for user in crowd.visitors(USERS, -(-requests // 5), 0.4):
        for _ in range(5):
            yield crowd.request(f"u{user}", lengths[user], growth=4)


def drifting(requests: int) -> Iterator[WorkRequest]:
    """The most active users are other ones after each 150 requests."""
    crowd = Crowd(5)
    lengths = crowd.lengths(USERS)
    for number, rank in enumerate(crowd.visitors(USERS, requests, 0.8)):
        user = (rank + 4 * (number // 150)) % USERS
        yield crowd.request(f"u{user}", lengths[user])


def published(requests: int) -> Iterator[WorkRequest]:
    """Sessions, pauses and lengths as published of a large recommender's log; no user is more active than others."""
    return generate(GeneratorSettings(users=200, requests=requests, zipf=0.0))


def cold(requests: int) -> Iterator[WorkRequest]:
    """Every request is another user's first."""
    crowd = Crowd(3)
    for number, length in enumerate(crowd.lengths(requests)):
        yield crowd.request(f"u{number}", length)


def mixed(requests: int) -> Iterator[WorkRequest]:
    """Every second request is an ordinary one: it names no user, and begins like some others."""
    crowd = Crowd(4)
    lengths = crowd.lengths(USERS)
    openings = [tuple(crowd.rng.integers(0, ITEMS, size=256).tolist()) for _ in range(8)]
    for number, user in enumerate(crowd.visitors(USERS, requests, 0.8)):
        if number % 2 == 0:
            made = crowd.request(f"u{user}", lengths[user])
            yield WorkRequest(float(number), made.user, made.new_items, made.history_items_total, made.candidates)
        else:
            rest = tuple(crowd.rng.integers(0, ITEMS, size=64).tolist())
            opening = openings[user % len(openings)]
            yield WorkRequest(float(number), f"ordinary{number}", opening, len(opening), rest, anonymous=True)


def movielens(data: Path, requests: int) -> Iterator[WorkRequest]:
    """The ratings of MovieLens in their order: a request for each ten of a user."""
    events, _ = read_events(data / "movielens-latest-small" / "ratings.csv", "ratings", skip_bad=False)
    return build_requests(events, every=10, candidates=(32, 64), min_history=20, max_requests=requests)


def otto(data: Path, requests: int) -> Iterator[WorkRequest]:
    """The sessions of OTTO in their order: a request for each two events."""
    events, _ = read_events(data / "otto" / "train_sample.jsonl", "otto", skip_bad=False)
    return build_requests(events, every=2, candidates=(32, 64), min_history=5, max_requests=requests)


def conversations(data: Path, requests: int) -> Iterator[WorkRequest]:
    """Mooncake's public trace of conversations: nobody is named, and prompts share what they begin with.

    Raises:
        InvalidSettingError: there is no trace in ``data``.

    """
    file = data / "mooncake-traces" / "conversation_trace.jsonl"
    if not file.is_file():
        raise InvalidSettingError(f"--data: there is no {file}; leave the scenario out, or fetch it.")
    with file.open(encoding="utf-8") as lines:
        traced = (json.loads(line) for line in lines)
        short = (request for request in traced if 2 <= len(request["hash_ids"]) <= TRACE_HASHES)
        for number, request in enumerate(islice(short, requests)):
            items = [name * TRACE_ITEMS + place for name in request["hash_ids"] for place in range(TRACE_ITEMS)]
            # The last one is rarely full in the trace; so that answers depend on it, it is here.
            known, last = tuple(items[:-TRACE_ITEMS]), tuple(items[-TRACE_ITEMS:])
            yield WorkRequest(request["timestamp"] / 1000, f"prompt{number}", known, len(known), last, anonymous=True)
