"""A thread that crashes fails the test that it crashed in."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CRASH = """
import threading

def test_crash():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
"""


def test_a_crashed_thread_fails_its_test(tmp_path: Path) -> None:
    test = tmp_path / "test_crash.py"
    test.write_text(CRASH)
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, "-p", "no:cacheprovider", str(test)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "1 failed" in done.stdout
