"""Systems of the benchmark suite with real engines, on a tiny workload."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.suite.run import run_system
from benchmarks.suite.system import Sizes
from benchmarks.suite.systems import SYSTEMS

from userkv.serving.demo_model import ensure_demo_model

pytestmark = pytest.mark.e2e

TOKEN_BYTES = 4096
"""Of the demo model in float32."""


@pytest.mark.parametrize("name", ["apc", "userkv-local"])
def test_a_tiny_run(name: str, tmp_path: Path) -> None:
    workload = tmp_path / "workload.jsonl"
    shape = ["--users", "10", "--requests", "60", "--median-history", "100", "--max-history", "400"]
    subprocess.run([sys.executable, "-m", "userkv.cli", "generate", str(workload), *shape], check=True, timeout=60)
    # HBM holds about half of the users.
    sizes = Sizes(block_size=64, hbm_blocks=48, pool_bytes=256 << 20, token_bytes=TOKEN_BYTES, max_model_len=2048)
    found = run_system(SYSTEMS[name], workload, sizes, ensure_demo_model(), concurrency=2, timeout_s=280)
    total = found["total"]
    assert (total["requests"], total["failed"]) == (60, 0)
    assert total["hit_ratio"] > 0
    assert found["settings"]["users"] is (name == "userkv-local")
    assert found["cpu_seconds"] > 0
    pool = found["pool"]
    if name == "apc":
        assert set(pool.values()) == {None}
    else:
        # A history is put once, and what is appended to it after that; candidates never are.
        assert 0 < pool["put_bytes"] < total["history_tokens"] * TOKEN_BYTES
        assert pool["got_bytes"] > 0
        assert pool["used_bytes"] > 0
