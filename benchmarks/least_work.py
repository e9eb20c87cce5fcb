"""What a system has to compute at least for the suite's main workload, if its pool is ample: tokens, and operations.

    .venv/bin/python benchmarks/least_work.py

No engine: this is arithmetic on the requests. A user's first request is computed whole; of each later one, a system
that keeps whole blocks computes the history's rest after the last full block, and all candidates; one that keeps tokens
computes the candidates alone. Operations are those of the suite's model: of its matrices per token, and of attention
per token and token before it.
"""

import argparse

from benchmarks.suite.command import MODEL
from benchmarks.suite.scenarios import BLOCK_SIZE
from benchmarks.suite.workloads import TOKENS_PER_ITEM, recommender

WIDTH, LAYERS, HIDDEN = MODEL["hidden_size"], MODEL["num_hidden_layers"], MODEL["intermediate_size"]
KV_WIDTH = 128
"""Two heads of 64, as the demo model has."""

PER_TOKEN = 2 * LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * KV_WIDTH + 3 * WIDTH * HIDDEN)
PER_PAIR = 4 * LAYERS * WIDTH


def operations(start: int, end: int) -> int:
    """To compute the tokens from ``start`` to ``end`` of a prompt whose first ``start`` tokens are there."""
    pairs = (end * (end + 1) - start * (start + 1)) // 2
    return (end - start) * PER_TOKEN + pairs * PER_PAIR


def main() -> None:
    parser = argparse.ArgumentParser(description="the least that systems compute for the suite's main workload")
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    names = ("no cache", "whole blocks", "UserKV")
    tokens, work = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    seen: set[str] = set()
    for request in recommender(args.requests):
        history = TOKENS_PER_ITEM * request.history_items_total
        end = history + TOKENS_PER_ITEM * len(request.candidates)
        known = history if request.user in seen else 0
        for name, start in zip(names, (0, known - known % BLOCK_SIZE, known), strict=True):
            tokens[name] += end - start
            work[name] += operations(start, end)
        seen.add(request.user)
    print("| | tokens per request | operations, of UserKV's |\n|---|---:|---:|")
    for name in names:
        print(f"| {name} | {tokens[name] / args.requests:.0f} | {work[name] / work['UserKV']:.2f}x |")


if __name__ == "__main__":
    main()
