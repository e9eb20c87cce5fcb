"""Programs of ``examples/``, run as a reader runs them."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str, timeout_s: float = 300) -> str:
    """Run an example in a process of its own and return what it printed; fails if it fails."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
