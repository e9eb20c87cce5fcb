"""The suite's command: its options, what it writes, and its exit status, with runs that only say that they were."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.suite import command, driver, machine, micro
from benchmarks.suite.__main__ import main
from benchmarks.suite.goals import GOALS
from benchmarks.suite.run import RunFailedError
from benchmarks.suite.scenarios import GR, QUICK_SCENARIOS
from benchmarks.suite.system import System
from benchmarks.suite.systems import SYSTEMS

from tests.support.suite import results, run_report


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "ensure_model", lambda config, name: tmp_path)
    return tmp_path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def run_system(system: System, *rest: object) -> dict[str, Any]:
        done.append(system.name)
        if system.name == "userkv-local":
            raise RunFailedError("it did not answer\nand said a lot")
        return run_report()

    monkeypatch.setattr(driver, "run_system", run_system)
    return done


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--json", "missing/bench.json"], "--json"),
        (["--json", "."], "--json"),
        (["--json", "results.md"], "--json"),
        (["--json", "/dev/null"], "--json"),
        (["--scenarios", ","], "--scenarios"),
        (["--scenarios", "gr,nonsense"], "--scenarios"),
        (["--systems", "apc,nonsense"], "--systems"),
        (["--parts", "nonsense"], "--parts"),
        (["--repeat", "0"], "--repeat"),
        (["--repeat", "twice"], "--repeat"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_a_bad_option_is_named_in_one_sentence(
    words: list[str], option: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"userkv: {option} ")
    assert said.count("\n") == 1
    assert words[1].split(",")[-1] in said
    assert runs == []


FOREIGN = '{"userkv_bench": 1, "machine": {}, "policies": [], "micro": {}, "scenarios": %s}'


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        '{"userkv_bench": 0}',
        '{"userkv_bench": 1}',
        FOREIGN % "null",
        FOREIGN % '[{"name": "gr"}]',
        FOREIGN % '[{"name": "of tomorrow"}]',
    ],
)
def test_it_does_not_go_on_with_a_file_of_somebody_else(
    text: str, here: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bench.json").write_text(text)
    assert main(["--resume", "--scenarios", "cold"]) == 2
    assert "--resume cannot go on with bench.json" in capsys.readouterr().err
    assert (here / "bench.json").read_text() == text


def bench(here: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["--parts", "scenarios", "--json", str(here / "found.json"), *words])
    found: dict[str, Any] = json.loads((here / "found.json").read_text())
    return status, found


def test_figures_and_goals_are_written(here: Path, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, found = bench(here, "--scenarios", "cold", "--systems", "userkv-hbm,apc", "--requests", "3")
    assert status == 0
    assert runs == ["apc", "userkv-hbm"]
    (comparison,) = found["scenarios"]
    assert (comparison["name"], comparison["requests"], list(comparison["systems"])) == ("cold", 3, runs)
    assert [goal["name"] for goal in found["goals"]] == [goal.name for goal in GOALS]
    goals = {goal["name"]: goal for goal in found["goals"]}
    cold = goals["cold users: requests/s of the slowest, stock vLLM"]
    assert (cold["figure"], cold["met"], cold["missing"]) == (1.0, None, ["userkv-local", "userkv-mooncake"])
    assert {goal["met"] for goal in found["goals"]} == {None}
    document = (here / "found.md").read_text()
    assert capsys.readouterr().out.strip() == document.strip()
    assert SYSTEMS["userkv-hbm"].title in document
    assert sorted(file.name for file in here.iterdir()) == ["found.json", "found.md"]


def test_a_system_that_fails_is_named_and_the_status_is_1(here: Path, runs: list[str]) -> None:
    status, found = bench(here, "--scenarios", "cold", "--requests", "3")
    assert status == 1
    assert runs == ["apc", "userkv-hbm", "userkv-local", "userkv-mooncake"]
    assert found["scenarios"][0]["left_out"] == {"userkv-local": "it did not answer"}
    assert "left out: it did not answer" in (here / "found.md").read_text()


def test_a_call_goes_on_with_what_another_has_written(here: Path, runs: list[str]) -> None:
    few = ["--systems", "apc", "--requests", "3"]
    bench(here, "--scenarios", "cold", *few)
    _, found = bench(here, "--scenarios", "ordinary,cold", *few, "--resume")
    assert runs == ["apc", "apc"]
    assert [each["name"] for each in found["scenarios"]] == ["cold", "ordinary"]
    bench(here, "--scenarios", "cold", *few)
    assert runs == ["apc", "apc", "apc"]


def test_it_does_not_mix_figures_that_cannot_be_compared(
    here: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten runs of sixty requests were once replaced by one of four."""
    few = ["--scenarios", "cold", "--systems", "apc", "--resume"]
    bench(here, *few, "--requests", "3")
    before = (here / "found.json").read_text()
    words = ["--parts", "scenarios", "--json", str(here / "found.json"), *few]
    assert main([*words, "--requests", "4"]) == 2
    assert "--resume: cold has 3 requests in the file, not 4; set --requests" in capsys.readouterr().err
    assert (here / "found.json").read_text() == before
    (here / "found.json").write_text(before.replace('"cores": ', '"cores": 9'))
    assert main([*words, "--requests", "3"]) == 2
    assert "figures are of another machine" in capsys.readouterr().err
    assert runs == ["apc"]


def test_tables_of_others_are_not_overwritten(here: Path, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (here / "notes.md").write_text("mine")
    assert main(["--scenarios", "cold", "--json", "notes.json"]) == 2
    assert "--json would overwrite notes.md" in capsys.readouterr().err
    assert (here / "notes.md").read_text() == "mine"
    assert runs == []


def test_quick_takes_what_each_goal_needs(runs: list[str], here: Path) -> None:
    """Of its scenarios alone, and enough of them that no goal of theirs lacks a figure."""
    _, found = bench(here, "--quick", "--requests", "2", "--data", "missing")
    assert {each["name"] for each in found["scenarios"]} == {"gr", "gr-512", "visits", "sessions", "cold", "ordinary"}
    complete = results()
    for scenario in complete["scenarios"]:
        quick = next((each for each in found["scenarios"] if each["name"] == scenario["name"]), None)
        ran = {*quick["systems"], *quick["left_out"]} if quick else set()
        scenario["systems"] = {name: entry for name, entry in scenario["systems"].items() if name in ran}
    assert [goal.name for goal in GOALS if goal.figure(complete) is None] == []


def test_quick_simulates_what_its_engines_run(here: Path) -> None:
    """Or what they hit could not be held against Belady's optimum."""
    _, found = bench(here, "--quick", "--parts", "policies")
    (gr,) = (each for each in QUICK_SCENARIOS if each.name == GR)
    assert [(row["workload"], row["requests"]) for row in found["policies"]] == [(GR, gr.requests)]


def test_workloads_of_logs_need_the_logs(here: Path, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, found = bench(here, "--scenarios", "otto", "--data", str(here / "missing"))
    assert found["scenarios"] == []
    assert "otto is left out" in capsys.readouterr().err


def test_a_script_that_fails_does_not_stop_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_script(directory: Path, name: str, words: tuple[str, ...]) -> dict[str, Any]:
        if name == "table_scale":
            raise RunFailedError("table_scale.py ended with status 1")
        return {"mooncake_share_hidden": 0.7}

    monkeypatch.setattr(micro, "run_script", run_script)
    assert main(["--parts", "micro", "--json", "found.json"]) == 1
    found = json.loads((here / "found.json").read_text())["micro"]
    assert found.keys() == micro.SCRIPTS.keys() - {"table_scale"}
    assert "table_scale.py ended with status 1" in capsys.readouterr().err


def test_scripts_go_on_where_they_were_stopped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_script(directory: Path, name: str, words: tuple[str, ...]) -> dict[str, Any]:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(name)
        return {"figure": 1.0}

    monkeypatch.setattr(micro, "run_script", run_script)
    assert main(["--parts", "micro", "--json", "found.json"]) == 130
    found = json.loads((here / "found.json").read_text())["micro"]
    assert list(found) == ran
    monkeypatch.setattr(micro, "run_script", lambda directory, name, words: ran.append(name) or {"figure": 1.0})
    assert main(["--parts", "micro", "--json", "found.json", "--resume"]) == 0
    assert ran == list(micro.SCRIPTS)


SCRIPT = "import json, sys; json.dump({'figures': {'words': sys.argv[3:]}}, open(sys.argv[2], 'w'))"


def test_a_script_says_its_figures(here: Path) -> None:
    (here / "it.py").write_text(SCRIPT)
    assert micro.run_script(here, "it", ("--repeats", "5")) == {"words": ["--repeats", "5"]}


def test_a_script_that_fails_says_why(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "it.py").write_text("import sys; sys.exit('no room')")
    with pytest.raises(RunFailedError, match=r"status 1; it said:\nno room"):
        micro.run_script(here, "it", ())
    (here / "it.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(micro, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(RunFailedError, match=r"not done after 0\.1 s"):
        micro.run_script(here, "it", ())


def test_what_was_measured_on() -> None:
    found = machine.machine()
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 20
    assert found["python"] == sys.version.split()[0]
    assert found["processor"]
    assert "userkv" in machine.versions()


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*words: object, **how: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert "commit" not in machine.versions()
