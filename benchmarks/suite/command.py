"""What ``python -m benchmarks.suite`` does with its options."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import machine, markdown, micro, plots
from benchmarks.suite.driver import Comparison, run_comparisons
from benchmarks.suite.goals import judge_all
from benchmarks.suite.policies import simulate_policies
from benchmarks.suite.resume import VERSION, load_results, refuse_to_mix
from benchmarks.suite.run import RunFailedError
from benchmarks.suite.scenarios import QUICK_SCENARIOS, SCENARIOS
from benchmarks.suite.systems import SYSTEMS
from userkv.core import options
from userkv.core.errors import InvalidSettingError
from userkv.serving.demo_model import ensure_model

MODEL = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
"""Large enough that computing a history takes longer than the engine's overhead; 8 KiB of KV per token in float32."""

CONCURRENCY = (1, 4, 8)
"""For the simulation of policies: requests that hold blocks at a time."""

PARTS = ("scenarios", "policies", "micro")


def bench_command(args: Namespace) -> int:
    """Runs the command and returns its exit status: 0, or 1 if a system or a script has failed.

    Raises InvalidSettingError for options that cannot be used.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) != signal.SIG_IGN:  # As of nohup.
            signal.signal(ending, signal.default_int_handler)  # As Ctrl-C: whatever runs is taken down.
    data, file = Path(args.data), _results_file(args.json)
    repeat = options.whole_number("--repeat", args.repeat)
    parts = _chosen("--parts", args.parts, PARTS)
    comparisons = _comparisons(args, data)
    saved = load_results(file) if args.resume else {}
    refuse_to_mix(saved, comparisons if "scenarios" in parts else ())
    results: dict[str, Any] = {
        "userkv_bench": VERSION,
        "machine": machine.machine(),
        "versions": machine.versions(),
        "scenarios": [],
        "policies": saved.get("policies", []),
        "micro": saved.get("micro", {}),
        "goals": [],
    }

    # Of each scenario, since parts of one file may come from several calls.
    origin = {"date": time.strftime("%Y-%m-%d"), "command": _what_was_asked(args)}
    origin |= {name: version for name, version in machine.versions().items() if name == "commit"}
    earlier = {each["name"]: each for each in saved.get("scenarios", [])}

    def keep() -> None:
        found = earlier | {
            each.scenario.name: each.as_json() | {"last_run": origin} for each in comparisons if each.ran
        }
        results["scenarios"] = [found[scenario.name] for scenario in SCENARIOS if scenario.name in found]
        results["goals"] = judge_all(results)
        partial = file.with_name(file.name + ".part")
        partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        partial.replace(file)

    failed = False
    if "policies" in parts and not results["policies"]:
        results["policies"] = simulate_policies(data, args.quick, CONCURRENCY, progress=sys.stderr.isatty())
        keep()
    if "micro" in parts:
        failed |= _run_scripts(results["micro"], args.quick, keep)
    if "scenarios" in parts:
        model = ensure_model(MODEL, name="userkv-bench")
        run_comparisons(comparisons, SYSTEMS, model, data, repeat, earlier, keep)
        failed |= any(comparison.left_out for comparison in comparisons)
    keep()
    document = markdown.document(results)
    file.with_suffix(".md").write_text(document, encoding="utf-8")
    print(document)
    if args.plots:
        for plot in plots.draw(results, file.parent):
            print(f"benchmarks.suite: wrote {plot}", file=sys.stderr)
    return 1 if failed else 0


def _results_file(name: str) -> Path:
    """The file to write; its tables go beside it, under the same name with another ending."""
    file = Path(name)
    if not file.parent.is_dir() or file.suffix != ".json" or (file.exists() and not file.is_file()):
        raise InvalidSettingError(f"--json must be the name of a .json file in an existing directory, not {name!r}.")
    tables = file.with_suffix(".md")
    if tables.exists() and not file.exists():
        raise InvalidSettingError(
            f"--json would overwrite {tables}, too, which is no table of ours; name another file."
        )
    return file


def _what_was_asked(args: Namespace) -> str:
    """The command without what does not change the figures: where files lie, plots, and that it went on with others."""
    words = ["python", "-m", "benchmarks.suite", *(["--quick"] if args.quick else [])]
    for option in ("parts", "scenarios", "systems", "requests"):
        if getattr(args, option) is not None:
            words += [f"--{option}", getattr(args, option)]
    return shlex.join([*words, "--repeat", args.repeat])


def _comparisons(args: Namespace, data: Path) -> list[Comparison]:
    known = {scenario.name: scenario for scenario in (QUICK_SCENARIOS if args.quick else SCENARIOS)}
    names = _chosen("--scenarios", args.scenarios, tuple(known))
    systems = _chosen("--systems", args.systems, tuple(SYSTEMS))
    most = sys.maxsize if args.requests is None else options.whole_number("--requests", args.requests)
    found = []
    for name in names:
        scenario = known[name]
        if scenario.needs_data and not data.is_dir():
            print(f"benchmarks.suite: {name} is left out: there is no {data} (--data)", file=sys.stderr)
            continue
        found.append(
            Comparison(
                scenario,
                min(most, scenario.requests),
                [system for system in scenario.systems if system in systems],
            )
        )
    return found


def _chosen(option: str, text: str | None, known: Sequence[str]) -> Sequence[str]:
    if text is None:
        return known
    names = [name for name in text.split(",") if name]
    if not names:
        raise InvalidSettingError(f"{option} names nothing; there is {', '.join(known)}.")
    if unknown := [name for name in names if name not in known]:
        raise InvalidSettingError(f"{option} does not know {', '.join(unknown)}; there is {', '.join(known)}.")
    return [name for name in known if name in names]


def _run_scripts(found: dict[str, Any], quick: bool, keep: Callable[[], None]) -> bool:
    """Run the scripts of which there are no figures yet. Returns whether any has failed."""
    directory = micro.benchmarks_directory()
    if directory is None:
        print("benchmarks.suite: the small benchmarks need a checkout of UserKV; they are left out", file=sys.stderr)
        return False
    failed = False
    for name, words in (micro.QUICK if quick else micro.SCRIPTS).items():
        if name in found:
            continue
        print(f"benchmarks.suite: {name}", file=sys.stderr)
        try:
            found[name] = micro.run_script(directory, name, words)
        except RunFailedError as error:
            print(f"benchmarks.suite: {error}", file=sys.stderr)
            failed = True
        keep()
    return failed
