"""The figures of a report, against numpy and against sums by hand."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError
from userkv.replay.driver import Record
from userkv.replay.readings import Readings
from userkv.replay.report import make_report, percentile, summarize
from userkv.replay.report_table import table
from userkv.replay.target import Outcome
from userkv.replay.tiers import Tiers

TIMES = st.floats(0, 100)


@st.composite
def record_lists(draw: st.DrawFn) -> list[Record]:
    records = []
    sent = 0.0
    for index in range(draw(st.integers(0, 25))):
        sent += draw(TIMES)
        history, candidates = draw(st.integers(0, 1000)), draw(st.integers(1, 100))
        latency = draw(TIMES)
        if draw(st.booleans()):
            cached = draw(st.none() | st.integers(0, history + candidates))
            outcome = Outcome(True, None, history + candidates, cached, draw(st.floats(0, latency)), latency, 200)
        else:
            outcome = Outcome.failure(draw(st.sampled_from(["HTTP 400", "HTTP 500"])), latency, 400)
        records.append(Record(index, "u", draw(st.booleans()), history, sent, sent + latency, draw(TIMES), outcome))
    return records


@settings(max_examples=60)
@given(values=st.lists(st.floats(-1e6, 1e6), max_size=50), percent=st.sampled_from([50, 99]))
def test_percentiles(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    if found is None:
        assert not values
        return
    assert found == pytest.approx(np.quantile(np.array(values), percent / 100))
    assert sum(value <= found + 1e-6 for value in values) >= len(values) * percent / 100 - 1


@settings(max_examples=80)
@given(records=record_lists())
def test_hits_and_times_against_numpy(records: list[Record]) -> None:
    row = summarize(records)
    good = [record for record in records if record.outcome.ok]
    assert (row.requests, row.failed) == (len(records), len(records) - len(good))
    told = [record for record in good if record.outcome.cached_tokens is not None]
    prompt = np.array([record.outcome.prompt_tokens for record in told])
    cached = np.array([record.outcome.cached_tokens for record in told])
    history = np.array([record.history_tokens for record in told])
    assert row.unknown_cached == len(good) - len(told)
    assert row.hit_ratio == (pytest.approx(cached.sum() / prompt.sum()) if len(told) else None)
    if history.sum():
        assert row.history_hit_ratio == pytest.approx(np.minimum(cached, history).sum() / history.sum())
        assert 0 <= (row.history_hit_ratio or 0) <= 1
    else:
        assert row.history_hit_ratio is None
    if good:
        latencies = np.array([record.outcome.latency_s for record in good])
        assert row.latency_p50_s == pytest.approx(np.median(latencies))
        assert row.latency_p99_s == pytest.approx(np.quantile(latencies, 0.99))


@settings(max_examples=60)
@given(records=record_lists(), phases=st.integers(1, 7))
def test_the_parts_add_up_to_the_total(records: list[Record], phases: int) -> None:
    report = make_report(records, phases)
    assert len(report.phases) == min(phases, len(records))
    sizes = [row.requests for row in report.phases]
    assert not sizes or max(sizes) - min(sizes) <= 1
    for parts in (report.phases, [report.first_visit, report.returning]):
        for name in ("requests", "failed", "prompt_tokens", "cached_tokens", "history_tokens", "unknown_cached"):
            assert sum(getattr(row, name) for row in parts) == getattr(report.total, name)
    assert sum(report.failures.values()) == report.total.failed
    assert len(report.first_failures) == min(5, report.total.failed)
    assert json.loads(json.dumps(report.as_json({}, {})))["total"]["requests"] == len(records)
    assert len(table(report).splitlines()) >= 4 + len(report.phases)


def ok(index: int, sent: float, *, first: bool, history: int, cached: int | None, ttft: float = 0.1) -> Record:
    outcome = Outcome(True, None, history + 10, cached, ttft, 2 * ttft, 200)
    return Record(index, f"u{index}", first, history, sent, sent + 2 * ttft, 0.0, outcome)


EXAMPLE = [
    ok(0, 0.0, first=True, history=90, cached=0, ttft=0.5),
    ok(1, 1.0, first=False, history=90, cached=90),
    Record(2, "u2", False, 50, 2.0, 2.5, 0.0, Outcome.failure("HTTP 400: too long", 0.5, 400)),
    ok(3, 4.8, first=False, history=190, cached=180, ttft=0.1),
]


def test_an_example_by_hand() -> None:
    report = make_report(EXAMPLE, 2)
    total = report.total
    assert (total.requests, total.failed, total.prompt_tokens, total.cached_tokens) == (4, 1, 400, 270)
    assert (total.history_tokens, total.hit_ratio) == (370, 0.675)
    assert total.history_hit_ratio == pytest.approx(270 / 370)
    assert (total.duration_s, total.requests_per_s) == (5.0, 0.6)
    assert (report.first_visit.hit_ratio, report.returning.hit_ratio) == (0.0, 0.9)
    assert [row.requests for row in report.phases] == [2, 2]
    assert report.failures == {"HTTP 400: too long": 1}
    assert report.first_failures == [{"request": 2, "user": "u2", "status": 400, "message": "HTTP 400: too long"}]


def test_the_table_is_aligned_and_shows_failures() -> None:
    lines = table(make_report(EXAMPLE, 2)).splitlines()
    rows, notes = lines[:6], lines[6:]
    assert len({len(line) for line in rows}) == 1
    assert [line[:11].strip() for line in rows] == ["", "phase 1", "phase 2", "first visit", "returning", "total"]
    assert " ".join(rows[5].split()) == "total 4 1 400 270 67.5% 73.0% 100.0 492.0 200.0 984.0 0.60"
    assert notes == [
        "1 of 4 requests failed; the first ones:",
        "  request 2, user u2: HTTP 400: too long",
    ]


def test_where_histories_came_from() -> None:
    report = make_report(EXAMPLE, 2, Readings(Tiers(hbm=200, dram=50, ssd=10, computed=110, history=370)))
    assert table(report).splitlines()[6] == (
        "370 history tokens: 54.1% from HBM, 13.5% from the pool's DRAM, 2.7% from the pool's SSD, 29.7% computed."
    )
    assert report.as_json({}, {})["tiers"] == {"hbm": 200, "dram": 50, "ssd": 10, "computed": 110, "history": 370}


def test_cached_tokens_that_nobody_told_are_no_misses() -> None:
    report = make_report([ok(0, 0.0, first=True, history=90, cached=None)], 1)
    assert (report.total.hit_ratio, report.total.history_hit_ratio, report.total.unknown_cached) == (None, None, 1)
    assert "--enable-prompt-tokens-details" in table(report)


ROW = {
    *("requests", "failed", "prompt_tokens", "cached_tokens", "history_tokens", "unknown_cached"),
    *("hit_ratio", "history_hit_ratio", "ttft_p50_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s"),
    *("late_p99_s", "duration_s", "requests_per_s"),
}


def test_the_keys_of_the_json_are_stable() -> None:
    found: dict[str, Any] = make_report(EXAMPLE, 2).as_json({"file": "x"}, {"users": True})
    assert set(found) == {
        *("userkv_replay", "input", "settings", "total", "phases", "first_visit", "returning"),
        *("ranking", "tiers", "cpu_seconds", "engine_counters", "page_counters", "failures", "first_failures"),
    }
    assert found["userkv_replay"] == 1
    assert found["tiers"] is None
    assert all(set(row) == ROW for row in (found["total"], found["returning"], *found["phases"]))


def test_phases_start_at_one() -> None:
    with pytest.raises(InvalidSettingError, match="at least 1"):
        make_report(EXAMPLE, 0)
