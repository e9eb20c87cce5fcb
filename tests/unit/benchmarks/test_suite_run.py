"""A run of the benchmark suite: what it returns, and that nothing outlives it."""

import _thread
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.suite.run import RunFailedError, run_system
from benchmarks.suite.system import PoolCounters, Prepared, Sizes, System

SIZES = Sizes(block_size=128, hbm_blocks=189, pool_bytes=1 << 30, token_bytes=8192, max_model_len=4096)

HANGING = """
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", child.pid, flush=True)
open(PIDS, "w").write(str(child.pid) + "\\n")
time.sleep(600)
"""


class FakeSystem(System):
    """Its replay is any program of Python: ``report`` there is the path of the report to write,
    and ``PIDS`` that of a file for the pid of a child."""

    name, title = "fake", "Fake"

    def __init__(self, tmp_path: Path, program: str) -> None:
        self.directory: Path | None = None
        self.is_up = False
        self.pids = tmp_path / "pids"
        script = tmp_path / "program.py"
        names = f"report = sys.argv[sys.argv.index('--json') + 1]\nPIDS = {str(self.pids)!r}"
        script.write_text(f"import json, os, sys\n{names}\n{program}\n")
        self._python = tmp_path / "python"
        self._python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        self._python.chmod(0o700)

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        assert list(directory.iterdir()) == []
        self.directory, self.is_up = directory, True
        try:
            yield Prepared(
                env={"FAKE": "yes"},
                python=self._python,
                counters=lambda report: PoolCounters(put_bytes=report["put"] if self.is_up else None),
            )
        finally:
            self.is_up = False

    def wait_for_child(self) -> None:
        while not self.pids.exists() or not self.pids.read_text().endswith("\n"):
            time.sleep(0.02)

    def child_is_alive(self) -> bool:
        pid = int(self.pids.read_text())
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def run(system: FakeSystem, timeout_s: float = 60) -> dict[str, Any]:
    return run_system(system, Path("workload"), SIZES, Path("model"), 8, timeout_s)


def test_the_report_of_a_run(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "json.dump({'put': 5, 'env': os.environ['FAKE']}, open(report, 'w'))")
    found = run(system)
    assert found == {
        "put": 5,
        "env": "yes",
        "pool": {"put_bytes": 5, "got_bytes": None, "objects": None, "used_bytes": None},
    }
    assert system.directory is not None
    assert not system.directory.exists()


def test_the_callers_own_settings_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures would differ, and nobody could see why; files are where the caller has them."""
    monkeypatch.setenv("USERKV_EVICTION_POLICY", "lru")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("USERKV_HOME", "/home/of/mine")
    names = "('USERKV_EVICTION_POLICY', 'VLLM_CPU_KVCACHE_SPACE', 'USERKV_HOME')"
    program = f"json.dump({{'put': 5, 'env': [os.environ.get(name) for name in {names}]}}, open(report, 'w'))"
    assert run(FakeSystem(tmp_path, program))["env"] == [None, None, "/home/of/mine"]


def test_a_replay_that_fails_is_quoted(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "print('first words' + ' ' * 10_000)\nsys.exit('no such model')")
    with pytest.raises(RunFailedError, match="fake ended with status 1") as failure:
        run(system)
    assert str(failure.value).endswith("no such model")
    assert "first words" not in str(failure.value)
    assert not system.is_up


def test_some_requests_failed(tmp_path: Path) -> None:
    # Exit status 1 with a report: figures of what was answered are no figures of the system.
    system = FakeSystem(tmp_path, "json.dump({'put': 5}, open(report, 'w'))\nsys.exit(1)")
    with pytest.raises(RunFailedError, match="status 1"):
        run(system)


def test_a_run_that_takes_too_long_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeSystem(tmp_path, HANGING)
    wait = subprocess.Popen.wait

    def wait_for_the_child_only(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        system.wait_for_child()
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_the_child_only)
    with pytest.raises(RunFailedError, match=r"not done after 60 s(.|\n)*started"):
        run(system)
    assert not system.child_is_alive()
    assert not system.is_up


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, HANGING)

    def interrupt() -> None:
        system.wait_for_child()
        _thread.interrupt_main()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Tests in the background may ignore it.
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run(system)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not system.child_is_alive()
    assert not system.is_up


def test_what_a_finished_replay_leaves_running_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.suite.run._GRACE_SECONDS", 0.1)
    program = HANGING.replace("\ntime.sleep(600)\n", "\njson.dump({'put': 5}, open(report, 'w'))\n")
    system = FakeSystem(tmp_path, program)
    assert run(system)["put"] == 5
    assert not system.child_is_alive()
