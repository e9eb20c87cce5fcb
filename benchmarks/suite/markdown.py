"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.suite import policies
from benchmarks.suite.systems import SYSTEMS

Results = Mapping[str, Any]


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """One scenario: a row per system."""
    sizes, last, concurrency = comparison["sizes"], comparison["last_run"], comparison["concurrency"]
    pace = "each at its time" if concurrency is None else f"{concurrency} at once"
    lines = [
        f"**{comparison['name']}**: {comparison['title']}; {comparison['requests']} requests, "
        f"{pace}, {sizes['hbm_blocks']} KV blocks of {sizes['block_size']} tokens, "
        f"pools of {sizes['pool_bytes'] >> 20} MiB. Last call: `{last['command']}`, {last['date']}.",
        "",
        "| system | from cache | requests/s | TTFT p50 | p99 | CPU s | put | got | in the pool |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, entry in comparison["systems"].items():
        figures = entry["figures"]
        fewer = "" if entry["requests"] == comparison["requests"] else f" ({entry['requests']} requests)"
        cells = [
            SYSTEMS[name].title + fewer,
            _cell(figures, "hit_ratio", lambda value: f"{value:.1%}"),
            _cell(figures, "requests_per_s", lambda value: f"{value:.1f}", spread=True),
            _cell(figures, "ttft_p50_s", _milliseconds),
            _cell(figures, "ttft_p99_s", _milliseconds),
            _cell(figures, "cpu_seconds", lambda value: f"{value:.0f}"),
            _cell(figures, "put_bytes", _gib),
            _cell(figures, "got_bytes", _gib),
            _cell(figures, "used_bytes", _gib),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {SYSTEMS[name].title} | left out: {why} |" for name, why in comparison["left_out"].items()]
    return "\n".join(lines)


def goals_table(goals: list[Mapping[str, Any]]) -> str:
    """Goals, figures, and which are met."""
    lines = ["| what, divided by what | figure | goal | |", "|---|---:|---:|---|"]
    words = {True: "met", False: "**missed**"}
    for goal in goals:
        figure = "-" if goal["figure"] is None else f"{goal['figure']:.3g}"
        without = f"not decided without {', '.join(goal['missing'])}" if goal["missing"] else "not measured"
        lines.append(f"| {goal['name']} | {figure} | {goal['target']} | {words.get(goal['met'], without)} |")
    return "\n".join(lines)


def policies_table(rows: list[Mapping[str, Any]], concurrency: str) -> str:
    """Token hit ratios in HBM by policy, and as a share of Belady's."""
    names = list(rows[0]["hbm"][concurrency])
    lines = [f"| HBM, {concurrency} at once | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        ratios = row["hbm"][concurrency]
        best = ratios[policies.BELADY]
        cells = [f"{ratios[name]:.3f} ({ratios[name] / best:.2f})" for name in names]
        lines.append(f"| {row['workload']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pool_policies_table(rows: list[Mapping[str, Any]], share: str) -> str:
    """Token hit ratios of HBM and a pool together, by the policies of both."""
    names = list(rows[0]["pool"][share])
    lines = [f"| pool for {float(share):.0%} | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        cells = [f"{row['pool'][share][name]:.3f}" for name in names]
        lines.append(f"| {row['workload']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def document(results: Results) -> str:
    """All tables of a run."""
    machine = results["machine"]
    parts = [
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_bytes'] / 2**30:.0f} GiB. "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".",
        goals_table(results["goals"]),
        *(comparison_table(comparison) for comparison in results["scenarios"]),
    ]
    if rows := results.get("policies"):
        parts += [policies_table(rows, concurrency) for concurrency in rows[0]["hbm"]]
        parts += [pool_policies_table(rows, share) for share in rows[0]["pool"]]
    return "\n\n".join(parts) + "\n"


def _cell(figures: Mapping[str, Any], name: str, show: Any, spread: bool = False) -> str:
    figure = figures.get(name)
    if figure is None:
        return "-"
    text: str = show(figure["median"])
    if spread and figure["runs"] > 1:
        text += f" ({show(figure['least'])}-{show(figure['most'])})"
    return text


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
