"""How much of a load from the pool hides behind the computation in layerwise mode.

    .venv/bin/python benchmarks/layerwise_overlap.py --json FILE

A real engine (Qwen3-shaped, 16 layers, 16 KiB of KV per token in float32), one request at a time, whose history is
found in HBM or has to be loaded. HBM has room for one of two users, who take turns: each is loaded, and then found in
HBM. One engine loads layer by layer (``use_layerwise``), one loads all before it computes (``load_async=false``):

    hit       seconds to the first token with the history in HBM: the computation
    transfer  what a load adds if nothing hides it: seconds of the second engine, loaded minus hit
    exposed   what a load adds in layerwise mode
    hidden    1 - exposed / transfer

All differences are of medians within one engine. Pools: local memory; Mooncake over TCP, whose memory belongs to
another process of this machine; and "link", local memory behind a link of 1 GB/s that costs no CPU time, as a network
card that writes to memory by itself. For the link, both rows are what it adds to the same load without it: times on the
link alone. The others have in them what every load costs beside the transfer (look-up, waking threads), which nothing
can hide. The first layer's load is never hidden: of 16 layers, a sixteenth.

One core is kept free of the model, as the host's cores are beside a GPU: where every core computes, a transfer that
costs CPU time takes it from the computation and hides nothing. On two cores vLLM would compute on both.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from userkv.core.sizes import GIB

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from one_at_a_time import Asker, pool_engine

from userkv.store.backend import Region, Tier
from userkv.store.local import LocalBackend
from userkv.store.regions import total_bytes

MODEL = {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 1536}
BLOCK = 128
LAYERWISE, BEFORE = "layerwise", "before"
MODES: dict[str, dict[str, Any]] = {LAYERWISE: {"use_layerwise": True}, BEFORE: {"load_async": False}}
LOCAL, MOONCAKE, LINK = POOLS = ("local", "mooncake", "link")
LINK_SPEED = 1e9
"""Bytes per second."""
BEHIND_LINK = "USERKV_BENCH_BEHIND_LINK"
"""Set in the environment of the processes whose pool is behind the link."""

Times = dict[str, list[float]]
"""Seconds to the first token, by ``hit`` and ``loaded``."""


@contextmanager
def pool_options(pool: str) -> Iterator[dict[str, Any]]:
    """The connector's options for a pool, and what it needs to run."""
    if pool != MOONCAKE:
        with mock.patch.dict(os.environ, {BEHIND_LINK: "1"} if pool == LINK else {}):
            yield {"local_dir": "", "local_dram_bytes": GIB}
        return
    from tests.support.mooncake import Master, owner

    with Master(lease_ms=5000) as master, owner(master, GIB):
        address = f"127.0.0.1:{master.port}"
        yield {"backend": "mooncake", "master_server_address": address, "global_segment_size": 0}


def put_behind_a_link() -> None:
    """Let reading from a local pool take as long as it would over the link."""
    get, link = LocalBackend.get, threading.Lock()

    def get_slowly(self: LocalBackend, user: str, key: str, parts: Sequence[Region]) -> Tier:
        with link:
            end = time.perf_counter() + total_bytes(parts) / LINK_SPEED
            tier = get(self, user, key, parts)
            time.sleep(max(0.0, end - time.perf_counter()))
        return tier

    LocalBackend.get = get_slowly  # type: ignore[method-assign]


if BEHIND_LINK in os.environ:  # vLLM's processes run this file once more.
    put_behind_a_link()


class Users:
    """Two users, asked for one at a time."""

    def __init__(self, llm: Any, history: int, candidates: int) -> None:
        self._asker = Asker(llm, candidates)
        self._histories = {user: self._asker.tokens(history) for user in ("one", "two")}

    def compute(self) -> None:
        """Compute both histories; they are in the pool afterwards."""
        for user, history in self._histories.items():
            self._asker.ask(user, history)
            time.sleep(0.5)  # The save ends.

    def visit(self, times: Times) -> None:
        """Load each, and find each in HBM."""
        for user, history in self._histories.items():
            for row in ("loaded", "hit"):
                seconds, cached = self._asker.ask(user, history)
                if cached != len(history):
                    raise SystemExit(f"{cached} of {len(history)} tokens came from a cache where all should: {row}")
                times[row].append(seconds)


def measure(pool: str, mode: str, history: int, candidates: int, rounds: int) -> Times:
    times: Times = defaultdict(list)
    tokens = history + candidates + BLOCK
    blocks = -(-tokens // BLOCK) + 2  # Room for one user.
    with (
        pool_options(pool) as options,
        pool_engine(MODEL, "userkv-bench-deep", {**options, **MODES[mode]}, tokens, blocks) as llm,
    ):
        users = Users(llm, history, candidates)
        users.compute()
        users.visit(defaultdict(list))  # Warms up.
        for _ in range(rounds):
            users.visit(times)
    return times


def figures(pool: str, runs: dict[str, dict[str, Times]]) -> dict[str, float]:
    """Seconds of a pool, from medians, and the share of the transfer that was hidden."""
    added = {}
    for mode, times in runs[pool].items():
        without = runs[LOCAL][mode]["loaded"] if pool == LINK else times["hit"]
        added[mode] = statistics.median(times["loaded"]) - statistics.median(without)
    return {
        "hit_s": statistics.median(runs[pool][LAYERWISE]["hit"]),
        "transfer_s": added[BEFORE],
        "exposed_s": added[LAYERWISE],
        "share_hidden": 1 - added[LAYERWISE] / added[BEFORE],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="share of a load that hides behind the computation, layer by layer")
    parser.add_argument("--history", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=256, help="tokens to compute (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of two loads each (default: %(default)s)")
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=POOLS, help="link needs local (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args(arguments)
    os.environ |= {"KV_MANAGER_FOR_GR": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    runs: dict[str, dict[str, Times]] = {}
    for pool in args.pools:
        runs[pool] = {mode: measure(pool, mode, args.history, args.candidates, args.rounds) for mode in MODES}
    results = {pool: figures(pool, runs) for pool in args.pools}
    print(f"{args.history} tokens of history, {args.candidates} to compute, {os.cpu_count()} cores\n")
    print("| pool | computation | transfer | exposed | hidden |\n|---|---:|---:|---:|---:|")
    for pool, row in results.items():
        cells = " | ".join(f"{row[name] * 1e3:.1f} ms" for name in ("hit_s", "transfer_s", "exposed_s"))
        print(f"| {pool} | {cells} | {row['share_hidden']:.0%} |")
    if args.json:
        found = {f"{pool}_{name}": value for pool, row in results.items() for name, value in row.items()}
        args.json.write_text(json.dumps({"figures": found, "seconds": runs}, indent=1))


if __name__ == "__main__":
    main()
