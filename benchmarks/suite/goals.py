"""What UserKV aims at, and how far it is: each goal is one figure, computed from the results of a run of the suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.suite import policies, scenarios
from benchmarks.suite.scenarios import PEERS, POOLS

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal.

    Attributes:
        name: what is measured.
        target: what it should be.
        at_least: it should be that or more; otherwise that or less.
        figure: computes it; ``None`` if the results do not have what it takes.
        needs: scenario -> systems without any of which the figure may look better than it is: a goal that is met
            without them is not decided.

    """

    name: str
    target: float
    at_least: bool
    figure: Callable[[Results], float | None]
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def judge(self, results: Results) -> dict[str, Any]:
        """``{"name", "figure", "target", "met", "missing"}``.

        ``met`` is ``None`` where there is no figure, and where the figure would do but systems are ``missing``.
        """
        figure = self.figure(results)
        missing = [
            system
            for scenario, systems in self.needs.items()
            for system in systems
            if median(results, scenario, system, "requests_per_s") is None
        ]
        met: bool | None = None
        if figure is not None:
            met = figure >= self.target if self.at_least else figure <= self.target
        if met and missing:
            met = None
        bound = ">=" if self.at_least else "<="
        return {
            "name": self.name,
            "figure": figure,
            "target": f"{bound} {self.target:g}",
            "met": met,
            "missing": missing,
        }


def median(results: Results, scenario: str, system: str, figure: str) -> float | None:
    """A figure's median over the runs of a system."""
    for comparison in results.get("scenarios", ()):
        if comparison["name"] == scenario and system in comparison["systems"]:
            spread = comparison["systems"][system]["figures"].get(figure)
            return None if spread is None else float(spread["median"])
    return None


def best(results: Results, scenario: str, systems: Sequence[str], figure: str, least: bool = False) -> float | None:
    """The best of some systems' medians."""
    found = [value for name in systems if (value := median(results, scenario, name, figure)) is not None]
    return None if not found else min(found) if least else max(found)


def ratio(part: float | None, whole: float | None) -> float | None:
    """``None`` if either is missing."""
    return None if part is None or not whole else part / whole


def _speed(scenario: str, ours: Sequence[str], theirs: Sequence[str]) -> Callable[[Results], float | None]:
    return lambda results: ratio(
        best(results, scenario, ours, "requests_per_s"), best(results, scenario, theirs, "requests_per_s")
    )


def _hits(results: Results) -> float | None:
    return ratio(
        median(results, scenarios.GR, "userkv-hbm", "hit_ratio"), median(results, scenarios.GR, "apc", "hit_ratio")
    )


def _share_of_belady(results: Results) -> float | None:
    """What the engine hit, by what Belady hits in a simulation with as many requests at once as the client had."""
    requests = {each["name"]: each["requests"] for each in results.get("scenarios", ())}
    for row in results.get("policies", ()):
        if row["workload"] == scenarios.GR and row["requests"] == requests.get(scenarios.GR):
            optimum = row["hbm"][max(row["hbm"], key=int)][policies.BELADY_WHOLE]
            return ratio(median(results, scenarios.GR, "userkv-hbm", "hit_ratio"), optimum)
    return None


def _prefetched_p99(results: Results) -> float | None:
    requests = {each["name"]: each["requests"] for each in results.get("scenarios", ())}
    if requests.get(scenarios.SESSIONS) != 2 * requests.get(scenarios.VISITS, 0):
        return None  # The visits must be the same.
    return ratio(
        best(results, scenarios.SESSIONS, POOLS, "latency_p99_s", least=True),
        best(results, scenarios.VISITS, PEERS, "latency_p99_s", least=True),
    )


def _written(results: Results) -> float | None:
    ours = median(results, scenarios.GR, "userkv-mooncake", "put_bytes")
    # Who has written nothing has saved nobody.
    return ratio(ours or None, median(results, scenarios.GR, "mooncake-store-connector", "put_bytes"))


_COLD = ("userkv-hbm", "userkv-local", "userkv-mooncake")


def _slowest_with_cold_users(results: Results) -> float | None:
    return ratio(
        best(results, scenarios.COLD, _COLD, "requests_per_s", least=True),
        median(results, scenarios.COLD, "apc", "requests_per_s"),
    )


def _micro(script: str, figure: str) -> Callable[[Results], float | None]:
    """A figure of a script of ``benchmarks/``."""

    def look(results: Results) -> float | None:
        value = results.get("micro", {}).get(script, {}).get(figure)
        return None if value is None else float(value["median"] if isinstance(value, Mapping) else value)

    return look


GOALS = (
    Goal("pool for all: requests/s, best peer", 1.3, True, _speed(scenarios.GR, POOLS, PEERS), {scenarios.GR: PEERS}),
    Goal("pool for all: requests/s, vLLM APC", 4.0, True, _speed(scenarios.GR, POOLS, scenarios.APC)),
    Goal("pool for all: requests/s, no cache", 6.0, True, _speed(scenarios.GR, POOLS, scenarios.NO_CACHE)),
    Goal("p99 with histories prefetched, best peer's p99", 0.5, False, _prefetched_p99, {scenarios.VISITS: PEERS}),
    Goal(
        "pool of 512 MiB: token hit ratio",
        0.76,
        True,
        lambda results: best(results, scenarios.SMALL, POOLS, "hit_ratio"),
    ),
    Goal(
        "pool of 512 MiB: requests/s, best peer",
        1.5,
        True,
        _speed(scenarios.SMALL, POOLS, PEERS),
        {scenarios.SMALL: PEERS},
    ),
    Goal("bytes written to the pool, MooncakeStoreConnector", 0.25, False, _written),
    Goal("HBM only: token hit ratio, vLLM APC", 1.3, True, _hits),
    Goal("HBM only: token hit ratio, Belady over whole users", 0.85, True, _share_of_belady),
    Goal("nobody is named: requests/s, stock vLLM", 0.98, True, _speed(scenarios.ORDINARY, ("userkv-hbm",), ("apc",))),
    Goal(
        "cold users: requests/s of the slowest, stock vLLM",
        0.97,
        True,
        _slowest_with_cold_users,
        {scenarios.COLD: _COLD},
    ),
    Goal("swap-in from DRAM: bandwidth, memcpy", 0.9, True, _micro("pool_bandwidth", "get_dram_ratio")),
    Goal("swap-in from Mooncake: bandwidth, get_into", 0.9, True, _micro("pool_bandwidth_mooncake", "get_tcp_ratio")),
    Goal("scheduler's cost per request: worst p99, us", 100.0, False, _micro("scheduler_cost", "worst_p99_us")),
    Goal("scheduler's cost per request: 64k by 1k tokens, p50", 2.0, False, _micro("scheduler_cost", "growth")),
    Goal("a million users: bytes per user", 400.0, False, _micro("table_scale", "bytes_per_user")),
    Goal("a million users: slowest operation, us", 10.0, False, _micro("table_scale", "slowest_us")),
    Goal("layerwise: share of a load over TCP hidden", 0.8, True, _micro("layerwise_overlap", "mooncake_share_hidden")),
)
"""A name says what is measured and, after a comma, by what it is divided."""


def judge_all(results: Results) -> list[dict[str, Any]]:
    """All goals against one run's results."""
    return [goal.judge(results) for goal in GOALS]
