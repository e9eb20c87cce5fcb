"""Latency of ``/v1/rank``: history computed, from the pool, or in HBM, and how much of it is the model itself.

    .venv/bin/python benchmarks/rank_latency.py --json FILE

A real ``userkv serve`` for each of two models: an HSTU ranker (8 layers of 8 heads, width 256) and a Qwen3-shaped
ranker (8 layers, width 512), both in float32 with random weights. One client sends one request at a time over HTTP. In
each round a new user of each length comes (cold), comes again with other candidates (HBM), leaves HBM as another comes,
and comes once more (pool: DRAM). "Model" is the time in the forward pass and in the pooler, as the worker measures it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rank_models import MODELS

from userkv.client import RankClient

TOKENS = (512, 2048)
CANDIDATES = (16, 128, 512)


@contextmanager
def server(model: Path, home: Path) -> Iterator[str]:
    """A running server's address."""
    here = Path(__file__).resolve().parent
    env = {**os.environ, "USERKV_HOME": str(home), "PYTHONPATH": str(here), "VLLM_SERVER_DEV_MODE": "1"}
    options = ["--port", "0", "--served-model-name", "ranker", "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", "5700", "--max-num-batched-tokens", "5760", "--pool-dram", "4GiB"]
    options += ["--max-users", "1", "--worker-extension-cls", "forward_timer.ForwardTimer"]
    process = subprocess.Popen(
        [sys.executable, "-m", "userkv.cli", "serve", "--model", str(model), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    try:
        assert process.stdout is not None
        yield next(line.split(" on ")[1].split()[0] for line in process.stdout if " on http://" in line)
    finally:
        process.terminate()
        process.wait(60)


class Bench:
    """One server under measurement."""

    def __init__(self, url: str, items: int, tokens_per_item: int) -> None:
        self._url = url
        self._client = RankClient(url, timeout_s=300)
        self._random = random.Random(0)
        self._items = items
        self._per_item = tokens_per_item
        self.rows: dict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
        self._call("start_timer")

    def round(self, number: int) -> None:
        """All lengths and numbers of candidates, once."""
        for tokens in TOKENS:
            for candidates in CANDIDATES:
                user = f"{number}-{tokens}-{candidates}"
                history = self._draw(tokens // self._per_item)
                self._measure(user, history, candidates, "cold")
                time.sleep(0.3)  # What he has is being saved, which would share the cores with what comes next.
                self._measure(user, history, candidates, "hbm")
                time.sleep(0.1)
                self._client.rank(f"{user}-other", self._draw(2), self._draw(1))  # HBM keeps one user: this one now.
                self._measure(user, history, candidates, "dram")

    def _measure(self, user: str, history: list[int], candidates: int, tier: str) -> None:
        chosen = self._draw(candidates)
        self._call("take_seconds")
        start = time.perf_counter()
        result = self._client.rank(user, history, chosen)
        seconds = time.perf_counter() - start
        cached = result.usage.cached_tokens
        found = "hbm" if cached.hbm else "dram" if cached.dram else "cold"
        if found == tier:  # Else he was not saved in time, or was pushed out: another round will do.
            self.rows[len(history) * self._per_item, candidates, tier].append((seconds, self._call("take_seconds")))

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(self._items) for _ in range(count)]

    def _call(self, method: str) -> float:
        request = urllib.request.Request(
            f"{self._url}/collective_rpc", json.dumps({"method": method}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read()
        return float(json.loads(body)["results"][0] or 0) if body else 0.0


def table(rows: dict[tuple[int, int, str], list[tuple[float, float]]]) -> Iterator[str]:
    """Markdown."""
    tiers = {"cold": "cold", "dram": "pool", "hbm": "HBM"}
    heads = [f"{name} p50 (p99)" for name in tiers.values()]
    yield f"| history | candidates | {' | '.join(heads)} | cold / HBM | outside the model, HBM |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for tokens in TOKENS:
        for candidates in CANDIDATES:
            p50, cells = {}, []
            for tier in tiers:
                seconds = [seconds for seconds, _ in rows[tokens, candidates, tier]] or [float("nan")]
                p50[tier] = statistics.median(seconds)
                cells.append(f"{p50[tier] * 1e3:.0f} ms ({float(np.percentile(seconds, 99)) * 1e3:.0f})")
            outside = statistics.median(1 - model / seconds for seconds, model in rows[tokens, candidates, "hbm"])
            ratio = p50["cold"] / p50["hbm"]
            yield f"| {tokens} | {candidates} | {' | '.join(cells)} | {ratio:.1f}x | {outside:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="latency of /v1/rank by tier, and the model's share of it")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, help="file for all samples: seconds, and those in the model")
    args = parser.parse_args()
    everything: dict[str, Any] = {}
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            model, items, tokens_per_item = MODELS[name](Path(directory) / "model")
            with server(model, Path(directory) / "home") as url:
                bench = Bench(url, items, tokens_per_item)
                for number in range(args.rounds + 1):
                    bench.round(number)
                    if number == 0:  # All memory has been touched by now.
                        bench.rows.clear()
        print(f"\n{name}: medians of {args.rounds} rounds\n")
        print("\n".join(table(bench.rows)))
        everything[name] = {"/".join(map(str, key)): samples for key, samples in bench.rows.items()}
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
