"""Runs scenarios through systems, in turn, and keeps every figure as soon as it is measured."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.suite.figures import figures_of, spreads_of
from benchmarks.suite.run import RunFailedError, run_system
from benchmarks.suite.scenarios import Scenario, sizes_of
from benchmarks.suite.system import Sizes, System, SystemMissingError
from benchmarks.suite.workloads import TOKENS_PER_ITEM
from userkv.core.errors import InvalidSettingError
from userkv.logs.workload_file import write_workload

Figures = dict[str, float | None]

SECONDS_PER_REQUEST = 3.0
"""A system that takes longer than this for each request hangs."""

START_SECONDS = 180.0


@dataclass(slots=True)
class Comparison:
    """A scenario and its runs so far.

    Attributes:
        scenario: what is run.
        requests: how many.
        systems: their names, in the order of the table.
        runs: per system, the figures of each run.
        left_out: per system that cannot run here or has failed, why.
        sizes: see :class:`Sizes`.
        ran: something was run, or tried, by this call.

    """

    scenario: Scenario
    requests: int
    systems: Sequence[str]
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    ran: bool = False

    def requests_of(self, system: str) -> int:
        """How many of the requests a system gets."""
        return min(self.requests, self.scenario.fewer.get(system, self.requests))

    def as_json(self) -> dict[str, Any]:
        """With a spread for each figure, and the single runs."""
        return {
            "name": self.scenario.name,
            "title": self.scenario.title,
            "requests": self.requests,
            "concurrency": self.scenario.concurrency,
            "sizes": self.sizes,
            "systems": {
                name: {
                    "requests": self.requests_of(name),
                    "figures": spreads_of(self.runs[name]),
                    "runs": self.runs[name],
                }
                for name in dict.fromkeys((*self.scenario.systems, *self.systems))
                if self.runs.get(name)
            },
            "left_out": self.left_out,
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Take over the runs that an interrupted call has saved, which are of the same requests.

        Raises:
            InvalidSettingError: the systems had other sizes.

        """
        if saved["sizes"] != self.sizes:
            raise InvalidSettingError(
                f"--resume: {self.scenario.name} was run with other sizes by another version; take it out of the file."
            )
        self.runs = {name: list(entry["runs"]) for name, entry in saved["systems"].items()}


def run_comparisons(
    comparisons: Sequence[Comparison],
    systems: Mapping[str, System],
    model: Path,
    data: Path,
    repeat: int,
    saved: Mapping[str, Mapping[str, Any]],
    keep: Callable[[], None],
) -> None:
    """Run what is missing until each system of each comparison has ``repeat`` runs.

    Args:
        comparisons: filled in.
        systems: by name.
        model: its directory.
        data: directory of the logs.
        repeat: runs per system; the systems take turns.
        saved: comparisons of an interrupted call, as JSON, by scenario.
        keep: called after each run.

    """
    with tempfile.TemporaryDirectory(prefix="userkv-workloads-") as temporary:
        for comparison in comparisons:
            requests = list(comparison.scenario.make(data, comparison.requests))
            for count in {comparison.requests_of(system) for system in comparison.systems}:
                write_workload(requests[:count], _file(temporary, comparison, count), TOKENS_PER_ITEM)
            comparison.sizes = asdict(sizes_of(comparison.scenario, requests))
            if comparison.scenario.name in saved:
                comparison.resume(saved[comparison.scenario.name])
        total = sum(repeat * len(comparison.systems) for comparison in comparisons)
        done = sum(min(repeat, len(each.runs.get(name, ()))) for each in comparisons for name in each.systems)
        with tqdm(total=total, initial=done, unit="run", file=sys.stderr) as bar:
            for comparison in comparisons:
                for turn in range(repeat):
                    for name in comparison.systems:
                        bar.set_description(f"{comparison.scenario.name}, {name}")
                        if len(comparison.runs.get(name, ())) <= turn and name not in comparison.left_out:
                            workload = _file(temporary, comparison, comparison.requests_of(name))
                            _run(comparison, systems[name], workload, model)
                            keep()
                            bar.update()


def _file(directory: str, comparison: Comparison, requests: int) -> Path:
    return Path(directory) / f"{comparison.scenario.name}-{requests}.jsonl"


def _run(comparison: Comparison, system: System, workload: Path, model: Path) -> None:
    comparison.ran = True
    timeout = START_SECONDS + SECONDS_PER_REQUEST * comparison.requests
    try:
        report = run_system(
            system, workload, Sizes(**comparison.sizes), model, comparison.scenario.concurrency, timeout
        )
    except (SystemMissingError, RunFailedError) as error:
        comparison.left_out[system.name] = str(error).splitlines()[0]
        print(f"benchmarks.suite: {system.name} is left out of {comparison.scenario.name}: {error}", file=sys.stderr)
        return
    comparison.runs.setdefault(system.name, []).append(figures_of(report))
