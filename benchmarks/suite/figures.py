"""Figures of runs, and what several runs of one system say together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FIGURES = {
    "hit_ratio": "tokens not computed, of all prompt tokens",
    "requests_per_s": "requests answered per second",
    "ttft_p50_s": "seconds to the first token, median",
    "ttft_p99_s": "seconds to the first token, 99th percentile",
    "latency_p99_s": "seconds to the end of the answer, 99th percentile of requests with candidates",
    "cpu_seconds": "CPU time of client, engine and servers",
    "put_bytes": "KV bytes written to the pool",
    "got_bytes": "KV bytes read from the pool",
    "objects": "objects in the pool at the end",
    "used_bytes": "bytes in the pool at the end",
}
"""Name in the results -> what it is."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several runs."""

    median: float
    least: float
    most: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))


def figures_of(report: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of one run, as ``run_system`` reports it; ``None`` where the system does not tell."""
    total, ranking, pool = report["total"], report["ranking"], report["pool"]
    return {
        "hit_ratio": total["hit_ratio"],
        "requests_per_s": total["requests_per_s"],
        "ttft_p50_s": ranking["ttft_p50_s"],
        "ttft_p99_s": ranking["ttft_p99_s"],
        "latency_p99_s": ranking["latency_p99_s"],
        "cpu_seconds": report["cpu_seconds"],
        **{name: pool[name] for name in ("put_bytes", "got_bytes", "objects", "used_bytes")},
    }


def spreads_of(runs: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Each figure over the runs, those that no run tells left out."""
    spreads = {}
    for name in FIGURES:
        values = [run[name] for run in runs if run.get(name) is not None]
        if values:
            spreads[name] = asdict(Spread.of([float(value) for value in values if value is not None]))
    return spreads
