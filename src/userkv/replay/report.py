"""Figures of a replay: as a table to read, and as JSON with stable keys.

The JSON object (version 1; lengths in tokens, times in seconds; null where there is nothing to compute from):

``userkv_replay``: 1. ``input``: {file, format, skipped_lines, skipped_examples: [{line, reason}]}. ``settings``: the
options of the run, with their defaults filled in. ``total``, ``first_visit`` (each user's first request),
``returning`` (all others), ``ranking`` (those with candidates) and each of ``phases`` (equal slices of the run, in the
order of sending) are objects with:

- ``requests``, ``failed``: number of requests, and of those not answered in full. Tokens and times are of the others.
- ``prompt_tokens``, ``cached_tokens``, ``history_tokens``: sums. Cached tokens are those not computed again.
- ``hit_ratio``: cached / prompt tokens. ``history_hit_ratio``: cached / history tokens, where a request counts at most
  the length of its history. Requests whose cached tokens the target did not tell (``unknown_cached``) are in neither.
- ``ttft_p50_s``, ``ttft_p99_s``: time to first token. ``latency_p50_s``, ``latency_p99_s``: time to the last.
- ``late_p99_s``: how much later than the workload's time requests were sent.
- ``duration_s``: from the first request sent to the last one ended. ``requests_per_s``: answered requests by that.

``tiers``: {hbm, dram, ssd, computed, history}: where the history tokens came from, counted by the engine: its own KV
cache, the pool's memory, the pool's disk, nowhere. The four add up to ``history``. The engine counts all requests that
it starts, so failed ones and those of other clients of the server are in it, and one that is preempted or whose load
fails counts twice. null if the server does not count (plain vLLM) or restarted meanwhile, or if no request named a
user.

``cpu_seconds``: user and system time between the first request sent and the last one ended, of this process with the
engine of an offline run, and of the processes named with ``--cpu-of``; descendants count, too.

``engine_counters``: {metric: value}: ``userkv_*``, and what vLLM's own KV connectors count, by name and labels such as
``userkv_swapin_tokens_total{tier="dram"}``: what counters, and sums and counts of histograms, have grown by between
the first request sent and a step after the last one, and the last value of gauges. All of the server's clients are in
them. null if the server cannot be asked or restarted meanwhile. ``page_counters``: {address: the same of that page, or
null}: all metrics of the pages named with ``--metrics``.

``failures``: {message: number}. ``first_failures``: the first few as [{request, user, status, message}].
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from userkv.core.errors import InvalidSettingError
from userkv.replay.driver import Record
from userkv.replay.readings import NOTHING_READ, Readings
from userkv.replay.tiers import Tiers

VERSION = 1
_FIRST_FAILURES = 5


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a set of requests; see the description of this module."""

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    history_tokens: int
    unknown_cached: int
    hit_ratio: float | None
    history_hit_ratio: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    late_p99_s: float | None
    duration_s: float
    requests_per_s: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole replay, cut and counted."""

    total: Row
    phases: list[Row]
    first_visit: Row
    returning: Row
    ranking: Row
    tiers: Tiers | None
    cpu_seconds: float | None
    engine_counters: Mapping[str, float] | None
    page_counters: Mapping[str, Mapping[str, float] | None]
    failures: dict[str, int]
    first_failures: list[dict[str, Any]]

    def as_json(self, source: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that this module describes, for ``source`` as "input" and ``settings``."""
        return {"userkv_replay": VERSION, "input": source, "settings": settings, **asdict(self)}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that ``percent`` of the values do not exceed, interpolated linearly; None of no values."""
    return float(np.percentile(values, percent)) if values else None


def summarize(records: Sequence[Record]) -> Row:
    """The figures of these requests."""
    good = [record for record in records if record.outcome.ok]
    told = [(record, record.outcome.cached_tokens) for record in good if record.outcome.cached_tokens is not None]
    cached_in_history = sum(min(cached, record.history_tokens) for record, cached in told)
    ttfts = [record.outcome.ttft_s for record in good if record.outcome.ttft_s is not None]
    latencies = [record.outcome.latency_s for record in good]
    duration = max((r.ended_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    cached_tokens = sum(cached for _, cached in told)
    return Row(
        requests=len(records),
        failed=len(records) - len(good),
        prompt_tokens=sum(record.outcome.prompt_tokens for record in good),
        cached_tokens=cached_tokens,
        history_tokens=sum(record.history_tokens for record in good),
        unknown_cached=len(good) - len(told),
        hit_ratio=_ratio(cached_tokens, sum(record.outcome.prompt_tokens for record, _ in told)),
        history_hit_ratio=_ratio(cached_in_history, sum(record.history_tokens for record, _ in told)),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        latency_p50_s=percentile(latencies, 50),
        latency_p99_s=percentile(latencies, 99),
        late_p99_s=percentile([record.late_s for record in good], 99),
        duration_s=duration,
        requests_per_s=_ratio(len(good), duration),
    )


def make_report(records: Sequence[Record], phases: int, readings: Readings = NOTHING_READ) -> Report:
    """Cuts the run, in the order of sending, into ``phases`` slices that differ by at most one request, and counts.

    readings: what was measured beside the requests.
    Raises InvalidSettingError if ``phases`` is less than 1. Fewer records than phases make fewer slices.
    """
    if phases < 1:
        raise InvalidSettingError(f"The number of phases must be at least 1, not {phases}.")
    records = sorted(records, key=lambda record: (record.sent_s, record.index))
    slices = min(phases, len(records))
    cuts = [len(records) * number // slices for number in range(slices + 1)] if slices else []
    failed = [record for record in records if not record.outcome.ok]
    return Report(
        total=summarize(records),
        phases=[summarize(records[start:end]) for start, end in itertools.pairwise(cuts)],
        first_visit=summarize([record for record in records if record.first_visit]),
        returning=summarize([record for record in records if not record.first_visit]),
        ranking=summarize([record for record in records if not record.history_only]),
        tiers=readings.tiers,
        cpu_seconds=readings.cpu_seconds,
        engine_counters=readings.engine_counters,
        page_counters=readings.page_counters,
        failures=dict(Counter(str(record.outcome.error) for record in failed).most_common()),
        first_failures=[
            {
                "request": record.index,
                "user": record.user,
                "status": record.outcome.status,
                "message": record.outcome.error,
            }
            for record in failed[:_FIRST_FAILURES]
        ],
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
