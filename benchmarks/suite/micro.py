"""The small benchmarks of ``benchmarks/``, run as scripts and read as figures."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.suite.run import run_command

SCRIPTS = {
    "pool_bandwidth": (),
    "pool_bandwidth_mooncake": (),
    "scheduler_cost": (),
    "record_codec": (),
    "table_scale": (),
    "layerwise_overlap": ("--pools", "mooncake"),
}
"""Script -> its options, beside ``--json FILE``."""

QUICK: dict[str, tuple[str, ...]] = {
    "pool_bandwidth": ("--repeats", "5"),
    "pool_bandwidth_mooncake": ("--repeats", "5"),
    "scheduler_cost": ("--repeat", "25"),
    "table_scale": (),
    "layerwise_overlap": ("--pools", "mooncake", "--rounds", "2", "--history", "3072"),
}

TIMEOUT_SECONDS = 600.0


def benchmarks_directory() -> Path | None:
    """``benchmarks/`` of the checkout that this package lies in; ``None`` if it was installed without one."""
    directory = Path(__file__).resolve().parents[1]
    return directory if (directory / "table_scale.py").is_file() else None


def run_script(directory: Path, name: str, options: tuple[str, ...]) -> dict[str, Any]:
    """The ``figures`` that a script writes.

    Raises:
        RunFailedError: it has failed; with the end of what it has said.

    """
    with tempfile.TemporaryDirectory(prefix="userkv-bench-") as temporary:
        file = Path(temporary) / "figures.json"
        command = [sys.executable, str(directory / f"{name}.py"), "--json", str(file), *options]
        run_command(f"{name}.py", command, os.environ, TIMEOUT_SECONDS)
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"]
        return figures
