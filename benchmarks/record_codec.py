"""Encoding and decoding of user records, against copying and hashing the same bytes.

    .venv/bin/python benchmarks/record_codec.py --json FILE

A record has the history's tokens and an extent for every 16 blocks of 128 tokens. The bound is what no codec can leave
out: one copy of its bytes and one checksum over them. What does not grow with the tokens is Python beside that.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from userkv.core.tokens import as_tokens
from userkv.records.record import Extent, UserRecord

LENGTHS = (1024, 4096, 16384, 65536)
BLOCK = 128
EXTENT_BLOCKS = 16
UID, NAMESPACE = "user-4711", "model#2026-11-30#0123456789abcdef"
BATCH = 50
"""Calls that are timed at once."""


def record_of(tokens: int) -> UserRecord:
    blocks = -(-tokens // BLOCK)
    extents = tuple(
        Extent(1 + first, first, min(EXTENT_BLOCKS, blocks - first)) for first in range(0, blocks, EXTENT_BLOCKS)
    )
    history = np.random.default_rng(tokens).integers(0, 1 << 20, tokens, np.int32)
    return UserRecord(1, as_tokens(history.tolist()), BLOCK, extents, "host:1", 1.0)


def microseconds(work: Callable[[], object]) -> float:
    """Per call."""
    start = time.perf_counter()
    for _ in range(BATCH):
        work()
    return (time.perf_counter() - start) / BATCH * 1e6


def works(tokens: int) -> dict[str, Callable[[], object]]:
    """What is measured on a history of so many tokens."""
    record = record_of(tokens)
    data = record.encode(UID, NAMESPACE)
    assert UserRecord.decode(data, UID, NAMESPACE) == record

    def copy_and_hash() -> int:
        return xxhash.xxh3_64_intdigest(bytearray(data))

    return {
        "encode": lambda: record.encode(UID, NAMESPACE),
        "decode": lambda: UserRecord.decode(data, UID, NAMESPACE),
        "bound": copy_and_hash,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="encoding and decoding of user records")
    parser.add_argument("--repeats", type=int, default=40, help=f"of {BATCH} calls each (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args(arguments)
    times: dict[int, dict[str, list[float]]] = {}
    gc.disable()
    for repeat in range(args.repeats + 1):
        for tokens in LENGTHS:
            for name, work in works(tokens).items():
                seen = times.setdefault(tokens, {}).setdefault(name, [])
                took = microseconds(work)
                if repeat:  # The first round warms up.
                    seen.append(took)
    figures = {}
    print("| history | encode | decode | copy and hash |\n|---:|---:|---:|---:|")
    for tokens, rows in times.items():
        medians = {name: statistics.median(values) for name, values in rows.items()}
        print(f"| {tokens} | " + " | ".join(f"{medians[name]:.1f} us" for name in ("encode", "decode", "bound")) + " |")
        for name, values in rows.items():
            spread = {"median": medians[name], "min": min(values), "max": max(values)}
            figures[f"{name}_{tokens // 1024}k_us"] = spread
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=1))


if __name__ == "__main__":
    main()
