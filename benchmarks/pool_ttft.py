"""Time to the first token of a known user: history computed, loaded from the pool, or found in HBM.

    .venv/bin/python benchmarks/pool_ttft.py --json FILE

One real engine (Qwen3-shaped, 8 KiB of KV per token in float32) with a local pool, one request at a time, 32 candidate
tokens. In each round a new user of each length is computed, pushed out of HBM by another one, loaded from the pool and
then hit in HBM. The SSD figures are of a second engine whose pool has no memory; its files are in the page cache.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from one_at_a_time import Asker, pool_engine

MODEL = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
LENGTHS = (1024, 2048, 4096)
CANDIDATES = 32
LONGEST = 4608
BLOCKS = 40
"""Of 128 tokens: room for one user of the longest kind, not for two."""


def measure(pool: dict[str, Any], rounds: int) -> dict[tuple[int, str], list[float]]:
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    with pool_engine(MODEL, "userkv-bench", pool, LONGEST, BLOCKS) as llm:
        asker = Asker(llm, CANDIDATES)
        for number in range(rounds + 1):
            for length in LENGTHS:
                user, history = f"user-{length}-{number}", asker.tokens(length)
                row = {"computed": asker.ask(user, history)}
                time.sleep(0.3)  # The save ends.
                asker.ask(f"filler-{length}-{number}", asker.tokens(LENGTHS[-1] + 256))
                time.sleep(0.3)
                row["pool"] = asker.ask(user, history)
                row["hbm"] = asker.ask(user, history)
                expected = {"computed": 0, "pool": length, "hbm": length}
                assert {name: cached for name, (_, cached) in row.items()} == expected, row
                if number:  # The first round warms up.
                    for name, (seconds, _) in row.items():
                        times[length, name].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="users per length (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    os.environ |= {"KV_MANAGER_FOR_GR": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        dram = {"local_dir": "", "local_dram_bytes": "2GiB"}
        ssd = {"local_dir": directory, "local_dram_bytes": 0}
        pools = {"dram": measure(dram, args.rounds), "ssd": measure(ssd, args.rounds)}
        for length in LENGTHS:
            computed = [*pools["dram"][length, "computed"], *pools["ssd"][length, "computed"]]
            hbm = [*pools["dram"][length, "hbm"], *pools["ssd"][length, "hbm"]]
            loads = {name: times[length, "pool"] for name, times in pools.items()}
            row = {"history_tokens": length, "computed": computed, "hbm": hbm, **loads}
            rows.append(row)
    print("| history | computed | pool, DRAM | pool, SSD files | HBM | computed / DRAM | DRAM / HBM |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        medians = {name: statistics.median(row[name]) for name in ("computed", "dram", "ssd", "hbm")}
        cells = " | ".join(f"{medians[name] * 1e3:.1f} ms" for name in ("computed", "dram", "ssd", "hbm"))
        ratios = f"{medians['computed'] / medians['dram']:.1f}x | {medians['dram'] / medians['hbm']:.1f}x"
        print(f"| {row['history_tokens']} | {cells} | {ratios} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
