"""Real logs through vLLM without a cache, with vLLM's prefix cache (APC), and with UserKV, in one run.

    .venv/bin/python benchmarks/hbm_replay.py --data DIR --repeat 3

``DIR`` (default: ``$USERKV_DATA``, else ``../shared/data``) holds ``movielens-latest-small/ratings.csv`` and
``otto/train_sample.jsonl`` as their publishers give them out; they are not part of this repository.

Every system is a fresh engine with the same model and the same room for KV, gets the same requests in the same
order with the same concurrency, and runs as often as ``--repeat`` says, in turn with the others. Figures are medians;
the ratio is to APC. What the log does to the cache: requests come in the log's order of time, one for every few events
of a user, with candidates that never repeat.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from userkv.serving.demo_model import ensure_model

MODEL = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
"""Large enough that computing a history takes longer than the engine's overhead; 8 KiB of KV per token."""

CACHE_BLOCK = 128


@dataclass(frozen=True)
class System:
    """Options of ``userkv replay``, and tokens per KV block."""

    options: tuple[str, ...]
    block_size: int = CACHE_BLOCK


APC = "vLLM APC"
SYSTEMS = {
    "no cache": System(("--no-users", "--engine-arg", "enable_prefix_caching=false")),
    APC: System(("--no-users", "--engine-arg", "enable_prefix_caching=true")),
    "vLLM APC, blocks of 32": System(("--no-users", "--engine-arg", "enable_prefix_caching=true"), 32),
    "UserKV": System(("--engine-arg", "enable_prefix_caching=true")),
}


@dataclass(frozen=True)
class Log:
    """A log, and how requests are made of it."""

    name: str
    file: str
    cache_tokens: int
    max_model_len: int
    options: tuple[str, ...]


LOGS = (
    Log(
        "MovieLens",
        "movielens-latest-small/ratings.csv",
        cache_tokens=120 * CACHE_BLOCK,
        max_model_len=8192,
        options=("--every", "10", "--min-history", "20", "--max-requests", "500"),
    ),
    Log(
        "OTTO",
        "otto/train_sample.jsonl",
        cache_tokens=40 * CACHE_BLOCK,
        max_model_len=4096,
        options=("--every", "2", "--min-history", "5"),
    ),
)


def run(log: Log, system: str, data: Path, model: Path, concurrency: int) -> dict[str, Any]:
    """One replay in processes of its own; its ``total`` as ``userkv replay --json`` reports it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "userkv.cli", "replay", str(data / log.file), "--offline", str(model)]
        command += [*log.options, "--candidates", "32:64", "--concurrency", str(concurrency), "--json", report.name]
        for argument in (
            f"num_gpu_blocks_override={log.cache_tokens // SYSTEMS[system].block_size}",
            f"block_size={SYSTEMS[system].block_size}",
            f"max_model_len={log.max_model_len}",
            "dtype=float32",
            "enforce_eager=true",
        ):
            command += ["--engine-arg", argument]
        env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USER_KV_LRU_MAX_USERS": "0"}
        done = subprocess.run([*command, *SYSTEMS[system].options], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{system} failed on {log.name}:\n{done.stderr[-3000:]}")
        total: dict[str, Any] = json.loads(Path(report.name).read_text())["total"]
        return total


def table(log: Log, runs: dict[str, list[dict[str, Any]]]) -> str:
    """The medians of a log's runs as a Markdown table."""

    def median(system: str, figure: str) -> float:
        return statistics.median(one[figure] for one in runs[system])

    lines = [
        f"| {log.name}, room for {log.cache_tokens:,} tokens | from cache | requests/s | vs APC | TTFT p50 | p99 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for system in SYSTEMS:
        speed = median(system, "requests_per_s")
        spread = [one["requests_per_s"] for one in runs[system]]
        cells = [
            system,
            f"{median(system, 'hit_ratio'):.1%}",
            f"{speed:.1f} ({min(spread):.1f}-{max(spread):.1f})",
            f"{speed / median(APC, 'requests_per_s'):.2f}x",
            f"{median(system, 'ttft_p50_s') * 1000:.0f} ms",
            f"{median(system, 'ttft_p99_s') * 1000:.0f} ms",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="real logs through vLLM without cache, with APC, and with UserKV")
    default = Path(os.environ.get("USERKV_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="directory of the logs (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    for log in LOGS:
        if not (args.data / log.file).is_file():
            parser.error(f"there is no {args.data / log.file}; name the directory of the logs with --data")
    model = ensure_model(MODEL, name="userkv-bench")
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tqdm(total=len(LOGS) * args.repeat * len(SYSTEMS), unit="run") as progress:
        for log in LOGS:
            runs = results[log.name] = {system: [] for system in SYSTEMS}
            for _ in range(args.repeat):
                for system in SYSTEMS:
                    progress.set_description(f"{log.name}, {system}")
                    runs[system].append(run(log, system, args.data, model, args.concurrency))
                    progress.update()
    for log in LOGS:
        print(f"\n{table(log, results[log.name])}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
