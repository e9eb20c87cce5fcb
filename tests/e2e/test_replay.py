"""`userkv generate` and an offline `userkv replay` of its file, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_generated_traffic_through_an_offline_engine(tmp_path: Path) -> None:
    workload, report = tmp_path / "workload.jsonl.gz", tmp_path / "report.json"
    userkv = [sys.executable, "-m", "userkv.cli"]
    shape = ["--users", "10", "--requests", "80", "--median-history", "100", "--max-history", "400"]
    subprocess.run([*userkv, "generate", str(workload), *shape], check=True, timeout=60)
    # HBM holds about half of the users.
    engine = ["--offline", "demo", "--engine-arg", "max_model_len=2048", "--engine-arg", "num_gpu_blocks_override=24"]
    engine += ["--concurrency", "2", "--pool", "local", "--pool-dir", str(tmp_path / "pool"), "--pool-dram", "256MiB"]
    done = subprocess.run(
        [*userkv, "replay", str(workload), *engine, "--json", str(report)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "first visit" in done.stdout
    figures = json.loads(report.read_text())
    assert figures["total"]["requests"] == 80
    assert figures["first_visit"]["cached_tokens"] == 0
    # Only what the user did since its last request is computed.
    assert figures["returning"]["history_hit_ratio"] > 0.8
    tiers = figures["tiers"]
    assert min(tiers["hbm"], tiers["dram"]) > 0
    assert tiers["history"] == figures["total"]["history_tokens"]  # However often a request starts.
    found = figures["total"]["history_hit_ratio"] * tiers["history"]
    assert tiers["hbm"] + tiers["dram"] + tiers["ssd"] == round(found)
    assert "from the pool's DRAM" in done.stdout
