"""Time to the first token of a known user: history computed, loaded from the pool, or found in HBM.

    .venv/bin/python benchmarks/pool_ttft.py --json FILE

One real engine (Qwen3-shaped, 8 KiB of KV per token in float32) with a local pool, one request at a time, 32 candidate
tokens. In each round a new user of each length is computed, pushed out of HBM by another one, loaded from the pool and
then hit in HBM. The SSD figures are of a second engine whose pool has no memory; its files are in the page cache.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from userkv.serving.demo_model import VOCAB_SIZE, ensure_model

MODEL = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
LENGTHS = (1024, 2048, 4096)
BLOCKS = 40
"""Of 128 tokens: room for one user of the longest kind, not for two."""


@contextmanager
def engine(pool: dict[str, Any]) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="MooncakeUserStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=pool,
    )
    llm = LLM(
        str(ensure_model(MODEL, name="userkv-bench")),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        kv_cache_memory_bytes=2**28,
        max_model_len=4608,
        max_num_batched_tokens=4608,
        num_gpu_blocks_override=BLOCKS,
        kv_transfer_config=transfer,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


class Asker:
    """Sends one request at a time."""

    def __init__(self, llm: Any, seed: int) -> None:
        self._llm = llm
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(16, VOCAB_SIZE) for _ in range(count)]

    def ask(self, user: str, history: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens came from a cache."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"user_id": user, "history_len": len(history)}}
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        prompt = {"prompt_token_ids": history + self.tokens(32)}
        start = time.perf_counter()
        (output,) = self._llm.generate([prompt], [params], use_tqdm=False)
        return time.perf_counter() - start, output.num_cached_tokens


def measure(pool: dict[str, Any], rounds: int) -> dict[tuple[int, str], list[float]]:
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    with engine(pool) as llm:
        asker = Asker(llm, seed=1)
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
