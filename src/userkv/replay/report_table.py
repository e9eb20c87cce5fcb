"""The report of a replay as aligned plain text."""

from __future__ import annotations

from userkv.replay.report import Report, Row
from userkv.replay.tiers import Tiers

_HEADINGS = (
    "",
    "requests",
    "failed",
    "prompt tok",
    "cached tok",
    "hit",
    "hist hit",
    "TTFT ms p50",
    "p99",
    "latency ms p50",
    "p99",
    "req/s",
)


def table(report: Report) -> str:
    """The rows of all phases, of first and returning visits and of the total, and what failed first."""
    rows = [(f"phase {number}", row) for number, row in enumerate(report.phases, 1)]
    rows += [("first visit", report.first_visit), ("returning", report.returning), ("total", report.total)]
    cells = [_HEADINGS, *(_cells(name, row) for name, row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    ]
    return "\n".join([*lines, *_notes(report)])


def _cells(name: str, row: Row) -> tuple[str, ...]:
    return (
        name,
        str(row.requests),
        str(row.failed),
        str(row.prompt_tokens),
        "-" if row.hit_ratio is None else str(row.cached_tokens),
        _percent(row.hit_ratio),
        _percent(row.history_hit_ratio),
        _milliseconds(row.ttft_p50_s),
        _milliseconds(row.ttft_p99_s),
        _milliseconds(row.latency_p50_s),
        _milliseconds(row.latency_p99_s),
        "-" if row.requests_per_s is None else f"{row.requests_per_s:.2f}",
    )


def _notes(report: Report) -> list[str]:
    notes = []
    if report.tiers is not None:
        notes.append(_sources(report.tiers))
    if report.total.unknown_cached:
        notes.append(
            f"{report.total.unknown_cached} answers do not tell their cached tokens and are in no hit ratio "
            "(vLLM tells them when started with --enable-prompt-tokens-details)."
        )
    if report.total.failed:
        notes.append(f"{report.total.failed} of {report.total.requests} requests failed; the first ones:")
        notes += [f"  request {one['request']}, user {one['user']}: {one['message']}" for one in report.first_failures]
    return notes


def _sources(tiers: Tiers) -> str:
    shares = {"HBM": tiers.hbm, "the pool's DRAM": tiers.dram, "the pool's SSD": tiers.ssd}
    found = ", ".join(f"{_percent(tokens / tiers.history)} from {name}" for name, tokens in shares.items())
    return f"{tiers.history} history tokens: {found}, {_percent(tiers.computed / tiers.history)} computed."


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
