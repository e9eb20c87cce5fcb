"""The suite's driver, with runs that only say that they were."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.suite import driver, workloads
from benchmarks.suite.driver import Comparison, run_comparisons
from benchmarks.suite.run import RunFailedError
from benchmarks.suite.scenarios import Scenario
from benchmarks.suite.system import Sizes, System, SystemMissingError
from benchmarks.suite.systems import SYSTEMS

from tests.support.suite import run_report
from userkv.core.errors import InvalidSettingError
from userkv.logs.workload_file import read_workload

FIRST, SECOND = "apc", "userkv-hbm"


def scenario(name: str = "s", **how: Any) -> Scenario:
    return Scenario(name, "a scenario", lambda data, requests: workloads.cold(requests), 5, (FIRST, SECOND), **how)


class Runs:
    """Stands for ``run_system``: notes which runs there were, and fails where it is told to."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.kept: list[int] = []
        self.lengths: list[int] = []
        self.sizes: list[Sizes] = []
        self.errors: dict[str, Exception] = {}

    def __call__(
        self, system: System, workload: Path, sizes: Sizes, model: Path, concurrency: int | None, timeout_s: float
    ) -> dict[str, Any]:
        self.done.append((workload.name.split("-")[0], system.name))
        self.lengths.append(len(read_workload(workload).requests))
        self.sizes.append(sizes)
        if system.name in self.errors:
            raise self.errors[system.name]
        return run_report(float(len(self.done)))

    def keep(self) -> None:
        self.kept.append(len(self.done))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(driver, "run_system", fake)
    return fake


Compare = Callable[..., list[Comparison]]


@pytest.fixture
def compare(runs: Runs, tmp_path: Path) -> Compare:
    def run(
        *scenarios: Scenario, repeat: int = 1, requests: int = 5, saved: Mapping[str, Any] | None = None
    ) -> list[Comparison]:
        comparisons = [Comparison(each, requests, each.systems) for each in scenarios]
        run_comparisons(comparisons, SYSTEMS, tmp_path, tmp_path, repeat, saved or {}, runs.keep)
        return comparisons

    return run


def test_systems_take_turns_and_each_run_is_kept(runs: Runs, compare: Compare) -> None:
    made = compare(scenario("s"), scenario("t"), repeat=2)
    turn = [FIRST, SECOND, FIRST, SECOND]
    assert runs.done == [*(("s", name) for name in turn), *(("t", name) for name in turn)]
    assert runs.kept == list(range(1, 9))
    assert [each["requests_per_s"] for each in made[0].runs[FIRST]] == [1.0, 3.0]
    assert made[0].as_json()["systems"][SECOND]["figures"]["requests_per_s"] == {
        "median": 3.0,
        "least": 2.0,
        "most": 4.0,
        "runs": 2,
    }


@pytest.mark.parametrize("error", [SystemMissingError("no\nserver"), RunFailedError("no\nanswer")])
def test_who_fails_is_left_out_and_the_others_go_on(
    error: Exception, runs: Runs, compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.errors[FIRST] = error
    (made,) = compare(scenario(), repeat=3)
    assert [name for _, name in runs.done] == [FIRST, SECOND, SECOND, SECOND]
    assert runs.kept == [1, 2, 3, 4]
    assert made.left_out == {FIRST: "no"}
    assert made.as_json()["systems"].keys() == {SECOND}
    assert str(error) in capsys.readouterr().err


def test_what_nobody_expects_is_not_hidden(runs: Runs, compare: Compare) -> None:
    runs.errors[FIRST] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        compare(scenario())


def test_an_interrupted_call_goes_on_where_it_was(runs: Runs, compare: Compare) -> None:
    (before,) = compare(scenario())
    saved = before.as_json()
    assert saved["systems"].keys() == {FIRST, SECOND}
    del saved["systems"][SECOND]
    runs.done.clear()
    (after,) = compare(scenario(), repeat=2, saved={"s": saved})
    assert [name for _, name in runs.done] == [SECOND, FIRST, SECOND]
    assert after.runs[FIRST][0] == before.runs[FIRST][0]
    assert [len(after.runs[name]) for name in (FIRST, SECOND)] == [2, 2]
    runs.done.clear()
    compare(scenario(), repeat=2, saved={"s": after.as_json()})
    assert runs.done == []


def test_it_does_not_go_on_with_runs_of_other_sizes(runs: Runs, compare: Compare) -> None:
    (before,) = compare(scenario())
    runs.done.clear()
    with pytest.raises(InvalidSettingError, match="s was run with other sizes"):
        compare(scenario(pool_bytes=1 << 20), saved={"s": before.as_json()})
    assert runs.done == []


def test_a_system_may_get_fewer_requests_but_the_same_memory(runs: Runs, compare: Compare) -> None:
    (made,) = compare(scenario(fewer={FIRST: 2, SECOND: 99}))
    assert runs.lengths == [2, 5]
    assert runs.sizes[0] == runs.sizes[1]
    assert [entry["requests"] for entry in made.as_json()["systems"].values()] == [2, 5]
