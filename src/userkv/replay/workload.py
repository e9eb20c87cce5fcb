"""Workloads: the requests of a generative recommender, made from what users did.

A request is ``[the user's history][fresh candidates]``. Histories grow by appending, so a request carries only what
is new since the user's previous one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from userkv.core.errors import InvalidSettingError
from userkv.logs.events import Event
from userkv.logs.work_request import WorkRequest
from userkv.replay.candidates import CandidateSampler


class GrowingHistory:
    """The history of one user between two requests: takes items, cuts itself, hands out the difference.

    max_items: a longer history loses its oldest *half* at once. Dropping one old item for each new one would change
    the first token of every request, so that no prefix could ever be reused; halving changes it once in
    ``max_items / 2`` items and leaves the history a stable prefix in between. None: never cut.
    """

    def __init__(self, max_items: int | None) -> None:
        self.length = 0
        self.seen: set[int] = set()
        self._max_items = max_items
        self._new: list[int] = []
        self._dropped = 0

    def append(self, item: int) -> None:
        """Adds the newest item."""
        self._new.append(item)
        self.seen.add(item)
        self.length += 1
        if self._max_items is not None and self.length > self._max_items:
            half = self.length // 2
            self.length -= half
            self._dropped += half

    def request(self, time: float, user: str, candidates: tuple[int, ...]) -> WorkRequest:
        """The request for the present history; the next one starts from here."""
        made = WorkRequest(time, user, tuple(self._new), self.length, candidates, self._dropped)
        self._new, self._dropped = [], 0
        return made


def build_requests(
    events: Iterable[Event],
    *,
    every: int,
    candidates: tuple[int, int],
    max_requests: int | None = None,
    min_history: int = 1,
    max_history: int | None = None,
    seed: int = 0,
) -> Iterator[WorkRequest]:
    """Yields the requests that a log of events leads to, in order of time (events of equal time keep their order).

    every: events of a user from one of his requests to the next. candidates: (low, high) per request, drawn with
    ``seed`` from all items of the log. min_history: items a user must have before his first request. max_history:
    longest history in items, see :class:`GrowingHistory`. max_requests: stop after so many.
    Raises InvalidSettingError for numbers out of range.
    """
    if every < 1:
        raise InvalidSettingError(f"A request is issued every 1 or more events, not every {every}.")
    if min_history < 1:
        raise InvalidSettingError(f"The shortest history must be at least 1 item, not {min_history}.")
    if max_requests is not None and max_requests < 1:
        raise InvalidSettingError(f"The number of requests must be at least 1, not {max_requests}.")
    check_max_history(max_history, min_history)
    in_time = sorted(events, key=lambda event: event.time)
    if not in_time:
        return
    universe = np.unique(np.fromiter((event.item for event in in_time), dtype=np.int64, count=len(in_time)))
    sampler = CandidateSampler(universe, candidates, np.random.default_rng(seed))
    histories: dict[str, GrowingHistory] = {}
    waiting: dict[str, int] = {}
    issued = 0
    for event in in_time:
        history = histories.setdefault(event.user, GrowingHistory(max_history))
        history.append(event.item)
        waiting[event.user] = waiting.get(event.user, 0) + 1
        if waiting[event.user] >= every and history.length >= min_history:
            waiting[event.user] = 0
            yield history.request(event.time, event.user, sampler.draw(history.seen))
            issued += 1
            if issued == max_requests:
                return


def check_max_history(max_history: int | None, min_history: int) -> None:
    """Raises InvalidSettingError if histories of ``min_history`` items could never be reached or kept."""
    if max_history is not None and max_history < max(2, min_history):
        raise InvalidSettingError(
            f"The longest history must be at least {max(2, min_history)} items (the shortest is {min_history}), "
            f"not {max_history}."
        )
