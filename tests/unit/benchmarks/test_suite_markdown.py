"""Tables and plots of results."""

import copy
from pathlib import Path

import pytest
from benchmarks.suite import markdown, plots
from benchmarks.suite.figures import FIGURES, Spread, figures_of, spreads_of
from benchmarks.suite.goals import GOALS, judge_all
from benchmarks.suite.systems import SYSTEMS

from tests.support.suite import results

COMPLETE = results()
COMPLETE["goals"] = judge_all(COMPLETE)


def row_of(table: str, start: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def comparison(name: str) -> dict[str, object]:
    (found,) = (each for each in COMPLETE["scenarios"] if each["name"] == name)
    return dict(found)


def test_the_document_has_everything() -> None:
    document = markdown.document(COMPLETE)
    for goal in GOALS:
        assert goal.name in document
    for system in SYSTEMS.values():
        assert f"| {system.title} |" in document
    for scenario in COMPLETE["scenarios"]:
        assert f"**{scenario['name']}**: {scenario['title']}" in document
    for words in (
        "A processor",
        "16 GiB",
        "userkv 1.2.3",
        "make bench",
        "HBM, 8 at once",
        "pool for 65%",
    ):
        assert words in document


def test_every_table_is_one() -> None:
    """As many cells in each row as in the head, or it is not shown as a table."""
    tables = [part for part in markdown.document(COMPLETE).split("\n\n") if part.startswith("|")]
    assert len(tables) == 1 + len(COMPLETE["scenarios"]) + 3
    for table in tables:
        head, line, *rows = table.splitlines()
        assert rows
        for row in (line, *(row for row in rows if "left out" not in row)):
            assert row.count("|") == head.count("|")


def test_a_system_is_a_row() -> None:
    cells = row_of(markdown.comparison_table(comparison("gr")), SYSTEMS["userkv-mooncake"].title)
    assert cells[1:] == ["16.0%", "16.0 (14.4-17.6)", "62 ms", "125 ms", "112", "1.00 GiB", "-", "-"]


def test_one_run_has_no_spread() -> None:
    once = copy.deepcopy(comparison("gr"))
    once["systems"]["apc"]["figures"]["requests_per_s"]["runs"] = 1  # type: ignore[index]
    assert row_of(markdown.comparison_table(once), SYSTEMS["apc"].title)[2] == "4.0"


def test_who_was_left_out_says_why() -> None:
    assert row_of(markdown.comparison_table(comparison("gr")), SYSTEMS["lmcache"].title)[1] == (
        "left out: it is not installed"
    )


def test_goals_are_met_missed_or_not_measured() -> None:
    goals = [
        {"name": "a", "figure": 1.23456, "target": ">= 1", "met": True, "missing": []},
        {"name": "b", "figure": 0.5, "target": ">= 1", "met": False, "missing": ["lmcache"]},
        {"name": "c", "figure": None, "target": ">= 1", "met": None, "missing": []},
        {"name": "d", "figure": 1.5, "target": ">= 1", "met": None, "missing": ["lmcache"]},
    ]
    table = markdown.goals_table(goals)
    assert row_of(table, "a")[1:] == ["1.23", ">= 1", "met"]
    assert row_of(table, "b")[1:] == ["0.5", ">= 1", "**missed**"]
    assert row_of(table, "c")[1:] == ["-", ">= 1", "not measured"]
    assert row_of(table, "d")[1:] == ["1.5", ">= 1", "not decided without lmcache"]


def test_policies_are_compared_with_the_optimum() -> None:
    assert row_of(markdown.policies_table(COMPLETE["policies"], "8"), "gr")[1:] == [
        "0.020 (0.20)",
        "0.050 (0.50)",
        "0.040 (0.40)",
        "0.030 (0.30)",
        "0.080 (0.80)",
        "0.100 (1.00)",
    ]


def test_without_policies_there_is_no_table_of_them() -> None:
    assert "at once |" not in markdown.document({**COMPLETE, "policies": []})


def test_a_figure_over_runs_leaves_out_those_that_do_not_tell() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    spreads = spreads_of([{"hit_ratio": 0.0, "objects": None}, {"hit_ratio": 0.5}])
    assert spreads == {"hit_ratio": {"median": 0.25, "least": 0.0, "most": 0.5, "runs": 2}}


def test_a_run_has_all_figures() -> None:
    pool = {"put_bytes": 1, "got_bytes": None, "objects": 3, "used_bytes": 4}
    times = {"ttft_p50_s": 0.1, "ttft_p99_s": 0.2, "latency_p99_s": 0.3}
    total = {"hit_ratio": 0.4, "requests_per_s": 5.0, "ttft_p99_s": 99.0}
    figures = figures_of({"total": total, "ranking": times, "pool": pool, "cpu_seconds": 6.0})
    assert figures == {"hit_ratio": 0.4, "requests_per_s": 5.0, **times, "cpu_seconds": 6.0, **pool}
    assert figures.keys() == FIGURES.keys()


def test_plots_are_equal_for_equal_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few = {**COMPLETE, "scenarios": [comparison("gr"), {**comparison("cold"), "systems": {}}]}
    drawn = [plots.draw(few, tmp_path / name) for name in ("first", "second")]
    assert [[file.name for file in files] for files in drawn] == [["gr.svg", "policies.svg"]] * 2
    for first, second in zip(*drawn, strict=True):
        assert first.read_bytes() == second.read_bytes()
    text = drawn[0][0].read_text()
    assert all(SYSTEMS[name].title in text for name in comparison("gr")["systems"])  # type: ignore[attr-defined]
