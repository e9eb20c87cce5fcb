"""Drives a target with a workload, and notes how each request went."""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from userkv.core.errors import InvalidSettingError
from userkv.logs.work_request import WorkRequest
from userkv.ranking.item_codec import ItemCodec
from userkv.replay.target import Outcome, Target


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to drive. Raises InvalidSettingError for numbers out of range.

    speed: None sends as fast as ``concurrency`` requests at once allow (closed loop); a number follows the times of
    the workload, divided by it, however many requests that makes at once (open loop). users: name the user of each
    request to the target. warmup: throw-away requests before the clock starts. progress: bar on stderr.
    """

    speed: float | None = None
    concurrency: int = 4
    users: bool = True
    warmup: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        if self.speed is not None and not 0 < self.speed < float("inf"):
            raise InvalidSettingError(f"The speed must be a number above 0 or 'max', not {self.speed}.")
        if self.concurrency < 1:
            raise InvalidSettingError(f"The concurrency must be at least 1, not {self.concurrency}.")
        if self.warmup < 0:
            raise InvalidSettingError(f"The number of warm-up requests must not be negative, but is {self.warmup}.")


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a replay. Times are seconds since the replay began.

    index: place in the workload. first_visit: the user's first request in it. history_tokens: length of the history
    in the prompt. late_s: how much later than the workload's time it was sent (open loop; 0 in a closed loop),
    because the user's previous request was still running or this process was busy. history_only: it had no candidates.
    """

    index: int
    user: str
    first_visit: bool
    history_tokens: int
    sent_s: float
    ended_s: float
    late_s: float
    outcome: Outcome
    history_only: bool = False


class Replay:
    """One run of a workload against a started target.

    A user's requests are sent in order, the next one after the previous one has ended, whatever the concurrency:
    a history cannot be ahead of itself. A failed request does not stop the run, nor the user.
    Raises InvalidSettingError if an item of the workload does not fit the codec.
    """

    def __init__(
        self, requests: Sequence[WorkRequest], codec: ItemCodec, target: Target, settings: ReplaySettings
    ) -> None:
        for request in requests:  # before anything is sent: a run that dies half-way has wasted its time
            codec.encode_many((*request.new_items, *request.candidates))
        self._requests = requests
        self._codec = codec
        self._target = target
        self._settings = settings
        self._waiting: dict[str, deque[int]] = {}
        for index, request in enumerate(requests):
            self._waiting.setdefault(request.user, deque()).append(index)
        self._histories: dict[str, list[int]] = {}
        self._began = 0.0

    async def run(self, begin: Callable[[], Awaitable[None]] | None = None) -> list[Record]:
        """Sends every request once and returns their records in the order of the workload.

        begin: awaited after the warm-up, before the first request is sent.
        """
        if self._requests:
            await self._warm_up()
        if begin is not None:
            await begin()
        if not self._requests:
            return []
        self._began = time.perf_counter()
        with tqdm(
            total=len(self._requests), unit="req", file=sys.stderr, disable=not self._settings.progress, leave=False
        ) as bar:
            if self._settings.speed is None:
                records = await self._closed_loop(self._settings.concurrency, bar)
            else:
                records = await self._open_loop(self._settings.speed, bar)
        return sorted(records, key=lambda record: record.index)

    async def _warm_up(self) -> None:
        """Lets the target do its first-request work (seconds of lazy set-up) outside of the measurement.

        The prompts have the length of the first request's and name no user. Their tokens are in reverse order, so
        they begin with a token that never begins a history (or, with one token per item, with a candidate) and leave
        nothing in a prefix cache that the workload could hit.
        """
        first = self._requests[0]
        tokens = self._codec.encode_many((*first.new_items, *first.candidates))[::-1]
        for _ in range(self._settings.warmup):
            outcome = await self._target.send(tokens, None, 0)
            if not outcome.ok:
                print(f"userkv: a warm-up request failed: {outcome.error}", file=sys.stderr)

    async def _closed_loop(self, concurrency: int, bar: tqdm[None]) -> list[Record]:
        # One entry per user who has nothing running, so a busy user never holds up the others; the smallest index
        # first keeps the workload's order as far as possible.
        ready = [indices.popleft() for indices in self._waiting.values()]
        heapq.heapify(ready)
        running: set[asyncio.Task[Record]] = set()
        records = []
        while ready or running:
            while ready and len(running) < concurrency:
                running.add(asyncio.create_task(self._send(heapq.heappop(ready), late_s=0.0)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                record = task.result()
                records.append(record)
                bar.update()
                if self._waiting[record.user]:
                    heapq.heappush(ready, self._waiting[record.user].popleft())
        return records

    async def _open_loop(self, speed: float, bar: tqdm[None]) -> list[Record]:
        records: list[Record] = []
        origin = self._requests[0].time

        async def follow(indices: deque[int]) -> None:
            for index in indices:
                due = (self._requests[index].time - origin) / speed
                await asyncio.sleep(max(0.0, due - self._now()))
                records.append(await self._send(index, late_s=max(0.0, self._now() - due)))
                bar.update()

        async with asyncio.TaskGroup() as group:
            for indices in self._waiting.values():
                group.create_task(follow(indices))
        return records

    async def _send(self, index: int, late_s: float) -> Record:
        request = self._requests[index]
        first_visit = request.user not in self._histories
        history = self._histories.setdefault(request.user, [])
        history += self._codec.encode_many(request.new_items)
        del history[: request.drop * self._codec.tokens_per_item]
        history_len = len(history)
        prompt = history + self._codec.encode_many(request.candidates)
        user = request.user if self._settings.users and not request.anonymous else None
        sent = self._now()
        outcome = await self._target.send(prompt, user, history_len)
        return Record(
            index, request.user, first_visit, history_len, sent, self._now(), late_s, outcome, not request.candidates
        )

    def _now(self) -> float:
        return time.perf_counter() - self._began
