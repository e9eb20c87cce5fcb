"""Users who come back after they have left HBM: without a pool, with the local pool, and with Mooncake, in one run.

    .venv/bin/python benchmarks/pool_replay.py --repeat 3

``--data`` (default: ``$USERKV_DATA``, else ``../shared/data``) holds ``movielens-latest-small/ratings.csv`` as its
publisher gives it out; it is not part of this repository.

In MovieLens itself hardly anybody comes back: 610 users in 22 years, most of them within a day. So users, histories
and what is appended are the log's, but all users are there at the same time: each pays ``VISITS`` visits of
``REQUESTS`` requests, and the visits of all users come in random order, always the same. HBM has room for a quarter of
the users. The local pool has memory for three quarters and disk for all; Mooncake, whose master is started here, has
memory for all.

Each run is a fresh engine with an empty pool, in turn with the other systems. Figures are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from userkv.logs.formats import read_events
from userkv.logs.work_request import WorkRequest
from userkv.logs.workload_file import write_workload
from userkv.replay.candidates import CandidateSampler
from userkv.replay.workload import GrowingHistory
from userkv.serving.demo_model import ensure_model

MODEL = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
"""As in the suite: large enough that computing a history takes longer than the engine's overhead."""

TOKEN_BYTES = 8192
BLOCK = 128
TOKENS_PER_ITEM = 2

USERS = 40
SHORTEST, LONGEST = 100, 300
"""Items of the histories at the end: users with fewer are left out, and longer ones are cut."""

VISITS, REQUESTS, APPENDED = 4, 2, 5
"""Visits per user, requests per visit, items from one request to the next."""

CANDIDATES = (32, 64)

USERKV = (sys.executable, "-m", "userkv.cli")
NONE, LOCAL, MOONCAKE = "none", "local", "mooncake"
NAMES = {NONE: "no pool", LOCAL: "local pool", MOONCAKE: "Mooncake pool"}
TIERS = ("hbm", "dram", "ssd")


class SystemMissingError(Exception):
    """This machine cannot run a system; says why."""


@dataclass(frozen=True)
class Visits:
    """The workload: its file, and how many KV blocks hold all users' histories at the end."""

    file: Path
    blocks: int


def make_visits(log: Path, file: Path) -> Visits:
    """Write the workload that this module describes."""
    events, _ = read_events(log, "ratings", skip_bad=False)
    items: dict[str, list[int]] = {}
    for event in sorted(events, key=lambda event: event.time):
        items.setdefault(event.user, []).append(event.item)
    universe = np.unique([event.item for event in events])
    rng = np.random.default_rng(0)
    sampler = CandidateSampler(universe, CANDIDATES, rng)
    histories = {user: kept[:LONGEST] for user, kept in items.items() if len(kept) >= SHORTEST}
    histories = dict(list(histories.items())[:USERS])
    growing = {user: GrowingHistory(None) for user in histories}
    left = dict.fromkeys(histories, VISITS * REQUESTS)
    requests: list[WorkRequest] = []
    for user in rng.permutation(list(histories) * VISITS).tolist():
        for _ in range(REQUESTS):
            left[user] -= 1
            for item in histories[user][growing[user].length : len(histories[user]) - APPENDED * left[user]]:
                growing[user].append(item)
            candidates = sampler.draw(growing[user].seen)
            requests.append(growing[user].request(float(len(requests)), user, candidates))
    write_workload(requests, file, TOKENS_PER_ITEM)
    return Visits(file, sum(-(-len(history) * TOKENS_PER_ITEM // BLOCK) for history in histories.values()))


@contextmanager
def pool(system: str, visits: Visits, directory: Path) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    """An empty pool: options of ``userkv replay``, and environment variables.

    Raises:
        SystemMissingError: this machine cannot run it.

    """
    if system == NONE:
        yield (), {}
    elif system == LOCAL:
        memory = visits.blocks * BLOCK * TOKEN_BYTES * 3 // 4
        yield ("--pool", "local", "--pool-dir", str(directory), "--pool-dram", str(memory)), {}
    else:
        with mooncake_master(directory) as config:
            yield ("--pool", "mooncake"), {"MOONCAKE_CONFIG_PATH": str(config)}


@contextmanager
def mooncake_master(directory: Path) -> Iterator[Path]:
    """A master on free ports of this machine; its clients' configuration file."""
    try:
        from userkv.store.mooncake.config import CONFIG_NAME
    except ImportError as error:
        raise SystemMissingError(str(error)) from error
    where = ("--dir", str(directory))
    start = [*USERKV, "pool", "start", *where, "--port", "0", "--metrics-port", "0"]
    started = subprocess.run(start, capture_output=True, text=True)
    if started.returncode:
        raise SystemMissingError((started.stderr.strip().splitlines() or ["userkv pool start failed"])[-1])
    try:
        yield directory / CONFIG_NAME
    finally:
        subprocess.run([*USERKV, "pool", "stop", *where], check=True, capture_output=True)


def run(system: str, visits: Visits, model: Path, concurrency: int) -> dict[str, Any]:
    """One replay in processes of its own, as ``userkv replay --json`` reports it."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        command = [*USERKV, "replay", str(visits.file), "--offline", str(model), "--json", str(report)]
        command += ["--concurrency", str(concurrency)]
        for argument in (
            f"num_gpu_blocks_override={visits.blocks // 4}",
            f"block_size={BLOCK}",
            "max_model_len=2048",
            "dtype=float32",
            "enforce_eager=true",
        ):
            command += ["--engine-arg", argument]
        with pool(system, visits, Path(temporary) / "pool") as (options, variables):
            env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USER_KV_LRU_MAX_USERS": "0"} | variables
            done = subprocess.run([*command, *options], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{NAMES[system]} failed:\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(report.read_text())
        return result


def table(visits: Visits, runs: dict[str, list[dict[str, Any]]]) -> str:
    """The medians of the runs as a Markdown table."""

    def median(system: str, figure: str) -> float:
        return float(statistics.median(one["total"][figure] for one in runs[system]))

    def tier(system: str, name: str) -> float:
        return float(statistics.median(one["tiers"][name] / one["total"]["prompt_tokens"] for one in runs[system]))

    lines = [
        f"| MovieLens, {USERS} users, room for {visits.blocks // 4 * BLOCK:,} of {visits.blocks * BLOCK:,} tokens "
        "| from cache | HBM | DRAM | SSD | requests/s | vs no pool | TTFT p50 | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for system in runs:
        speed = median(system, "requests_per_s")
        spread = [one["total"]["requests_per_s"] for one in runs[system]]
        cells = [
            NAMES[system],
            f"{median(system, 'hit_ratio'):.1%}",
            *(f"{tier(system, name):.1%}" for name in TIERS),
            f"{speed:.1f} ({min(spread):.1f}-{max(spread):.1f})",
            f"{speed / median(NONE, 'requests_per_s'):.2f}x" if NONE in runs else "-",
            f"{median(system, 'ttft_p50_s') * 1000:.0f} ms",
            f"{median(system, 'ttft_p99_s') * 1000:.0f} ms",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="users who come back, without and with a pool")
    default = Path(os.environ.get("USERKV_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="directory of the logs (default: %(default)s)")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=[*NAMES], help="which to run (default: all)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    log = args.data / "movielens-latest-small" / "ratings.csv"
    if not log.is_file():
        parser.error(f"there is no {log}; name the directory of the logs with --data")
    model = ensure_model(MODEL, name="userkv-bench")
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in dict.fromkeys(args.systems)}
    with tempfile.TemporaryDirectory() as temporary, tqdm(total=args.repeat * len(runs), unit="run") as progress:
        visits = make_visits(log, Path(temporary) / "visits.jsonl")
        for _ in range(args.repeat):
            for system in list(runs):
                progress.set_description(NAMES[system])
                try:
                    runs[system].append(run(system, visits, model, args.concurrency))
                except SystemMissingError as error:
                    print(f"{NAMES[system]} is left out: {error}", file=sys.stderr)
                    del runs[system]
                progress.update()
    if runs:
        print(f"\n{table(visits, runs)}")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
