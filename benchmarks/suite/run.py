"""One run of one system: prepared, replayed in processes of its own, measured and taken down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.suite.system import Prepared, Sizes, System
from userkv.core.errors import UserKVError

_LAST_WORDS = 6000
"""How much of what a failed replay has said is shown, characters."""

_INTERRUPTED_SECONDS = 8.0
"""For what is interrupted to take down what it has started: an engine's processes, a Mooncake master."""

_GRACE_SECONDS = 5.0
"""For what a replay that has ended leaves behind, such as Python's own process that frees shared memory."""

_KILLED_SECONDS = 5.0
"""For the system to bury what was killed."""

_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR"}

_DECIDES = ("VLLM_", "USERKV_", "KV_MANAGER_FOR_GR", "MOONCAKE_", "MC_", "LMCACHE_")
"""How variables begin that change what a system does. Those of the caller do not count, but for where files lie."""


class RunFailedError(UserKVError):
    """A system did not answer all requests of a run; says what the replay has said."""


def run_system(
    system: System, workload: Path, sizes: Sizes, model: Path, concurrency: int | None, timeout_s: float
) -> dict[str, Any]:
    """Replay a workload file through a fresh engine and an empty pool.

    Args:
        system: what runs.
        workload: the file.
        sizes: how much memory the engine and its pool have.
        model: its directory.
        concurrency: requests at once; ``None`` if each comes at its time.
        timeout_s: seconds until a run counts as failed.

    Returns:
        What ``userkv replay --json`` reports, with ``pool``: :class:`PoolCounters` as a dictionary. ``cpu_seconds``
        covers the servers beside the engine, too.

    Raises:
        SystemMissingError: this machine cannot run the system.
        RunFailedError: the replay has failed, or some of its requests have, or it took more than ``timeout_s`` seconds.

    """
    with tempfile.TemporaryDirectory(prefix="userkv-bench-") as temporary:
        directory = Path(temporary) / "system"
        directory.mkdir(mode=0o700)
        report = Path(temporary) / "report.json"
        with system.prepare(sizes, directory) as prepared:
            command = replay_command(prepared, workload, sizes, model, concurrency, report)
            kept = {name: value for name, value in os.environ.items() if not name.startswith(_DECIDES)}
            kept |= {name: os.environ[name] for name in ("USERKV_HOME",) if name in os.environ}
            run_command(
                f"the replay through {system.name}", command, {**kept, **_ENVIRONMENT, **prepared.env}, timeout_s
            )
            found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            found["pool"] = asdict(prepared.counters(found))
    return found


def replay_command(
    prepared: Prepared, workload: Path, sizes: Sizes, model: Path, concurrency: int | None, report: Path
) -> Sequence[str]:
    """The command line of a run, with what all systems have in common."""
    command = [str(prepared.python), "-m", "userkv.cli", "replay", str(workload), "--offline", str(model)]
    command += ["--json", str(report)]
    command += ["--speed", "1"] if concurrency is None else ["--concurrency", str(concurrency)]
    for argument in (
        f"num_gpu_blocks_override={sizes.hbm_blocks}",
        f"block_size={sizes.block_size}",
        f"max_model_len={sizes.max_model_len}",
        "dtype=float32",
        "enforce_eager=true",
    ):
        command += ["--engine-arg", argument]
    for pid in prepared.server_pids:
        command += ["--cpu-of", str(pid)]
    for page in prepared.metrics_pages:
        command += ["--metrics", page]
    return [*command, *prepared.options]


def run_command(what: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
    """Run a command to its end; whatever happens here, it and all that it has started end, too.

    Args:
        what: for messages.
        command: its words.
        env: all of its environment.
        timeout_s: seconds until it counts as failed.

    Raises:
        RunFailedError: it has failed; with the end of what it has said.

    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=words, stderr=words, start_new_session=True
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            try:
                if status is None:
                    process.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_INTERRUPTED_SECONDS)
            finally:
                _end_group(process)
        if status != 0:
            words.seek(0)
            said = words.read().decode("utf-8", "replace").strip()[-_LAST_WORDS:]
            reason = f"was not done after {timeout_s:g} s" if status is None else f"ended with status {status}"
            raise RunFailedError(f"{what[0].upper()}{what[1:]} {reason}; it said:\n{said}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its group, which has the engine's processes, after some time to end."""
    if process.poll() is None or not _is_gone(process.pid, _GRACE_SECONDS):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _is_gone(process.pid, _KILLED_SECONDS)  # The next run should find an idle machine, and memory.


def _is_gone(group: int, patience_s: float) -> bool:
    """Whether a process group has no members any more, after some time to end."""
    deadline = time.monotonic() + patience_s
    while _has_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _has_members(group: int) -> bool:
    """Whether any process of a group runs; those that have ended and wait to be buried do not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
