"""Going on with the results of an earlier call: what it has written, and whether it may be gone on with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.driver import Comparison
from benchmarks.suite.machine import machine
from benchmarks.suite.scenarios import SCENARIOS
from benchmarks.suite.systems import SYSTEMS
from userkv.core.errors import InvalidSettingError

VERSION = 1
"""Of the file of results."""

_SAME = ("processor", "cores")
"""What a machine must have in common with that of the earlier figures."""


def load_results(path: Path) -> dict[str, Any]:
    """What an earlier call has written; {} if there is nothing.

    Raises:
        InvalidSettingError: the file is something else.

    """
    if not path.exists():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        ours = results["userkv_bench"] == VERSION and all(map(_is_comparison, results["scenarios"]))
        ours = ours and isinstance(results["policies"], list) and isinstance(results["micro"], dict)
        ours = ours and isinstance(results["machine"], dict)
    except (ValueError, KeyError, TypeError, AttributeError):
        ours = False
    if not ours:
        raise InvalidSettingError(f"--resume cannot go on with {path}: it is not a results file of this suite.")
    found: dict[str, Any] = results
    return found


def refuse_to_mix(saved: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Refuse to put figures beside those of an earlier call that they cannot be compared with.

    Raises:
        InvalidSettingError: these are of another machine, or of another number of requests.

    """
    here = machine()
    if saved and any(saved["machine"].get(what) != here[what] for what in _SAME):
        raise InvalidSettingError("--resume: the file's figures are of another machine; name another --json.")
    requests = {each["name"]: each["requests"] for each in saved.get("scenarios", ())}
    for comparison in comparisons:
        name = comparison.scenario.name
        if requests.get(name, comparison.requests) != comparison.requests:
            raise InvalidSettingError(
                f"--resume: {name} has {requests[name]} requests in the file, not {comparison.requests}; "
                "set --requests to that, or name another --json."
            )


def _is_comparison(entry: dict[str, Any]) -> bool:
    return (
        entry["name"] in {scenario.name for scenario in SCENARIOS}
        and isinstance(entry["requests"], int)
        and isinstance(entry["sizes"], dict)
        and {"command", "date"} <= entry["last_run"].keys()
        and (entry["systems"].keys() | entry["left_out"].keys()) <= SYSTEMS.keys()
        and all(isinstance(system["runs"], list) for system in entry["systems"].values())
    )
