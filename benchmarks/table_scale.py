"""The user cache at up to a million users: memory per user, time per operation.

    .venv/bin/python benchmarks/table_scale.py

Every size runs the same operations on the same code that runs in vLLM's scheduler; the block pool only counts. What
matters is whether the figures stay flat: each is also given as a ratio to the smallest size of the same run.
"""

import argparse
import gc
import json
import random
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from userkv.cache.cache_request import CacheRequest
from userkv.cache.settings import CacheSettings
from userkv.cache.user_cache import UserCache
from userkv.core.request import UserKey, UserRequest
from userkv.core.tokens import as_tokens
from userkv.sim.blocks import SimBlock

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BLOCK_SIZE = 128
HISTORY = 200
OPERATIONS = 20_000


BLOCKS = tuple(SimBlock() for _ in range(512))
"""Everybody's: the engine has its blocks anyway, so they are no memory of the table's."""


class CountingPool:
    """The least a block pool must do."""

    def __init__(self) -> None:
        self.references = 0

    def touch(self, blocks: Sequence[SimBlock]) -> None:
        self.references += len(blocks)

    def free_blocks(self, ordered_blocks: Iterable[SimBlock]) -> None:
        self.references -= sum(1 for _ in ordered_blocks)


def lookup(number: int, tokens: int = HISTORY) -> CacheRequest:
    name = f"user-{number:09d}"
    history = np.full(tokens, number % 1000, np.int32)
    history.flags.writeable = False
    return CacheRequest(UserKey(name), UserRequest(name, tokens), history)


def blocks_of(tokens: int) -> Sequence[SimBlock]:
    """Blocks for a history."""
    return BLOCKS[: -(-tokens // BLOCK_SIZE)]


def serve(cache: UserCache, number: int, user: CacheRequest) -> None:
    """One request of a user, from look-up to end."""
    request_id = str(number)
    hit = cache.find_hit(request_id, user, len(user.history) + 1)
    cache.start(request_id, user, hit.num_tokens, hit.num_tokens)
    cache.finish(request_id, len(user.history) + 1, blocks_of(len(user.history)))


def per_operation(work: Callable[[int], None]) -> float:
    """Median microseconds of an operation over batches of 100."""
    times = []
    for batch in range(0, OPERATIONS, 100):
        start = time.perf_counter()
        for i in range(batch, batch + 100):
            work(i)
        times.append((time.perf_counter() - start) * 1e4)
    return float(np.median(times))


def stages(cache: UserCache, users: Sequence[CacheRequest], first: int) -> dict[str, float]:
    """Median microseconds of the steps of a request's life."""
    ids = [str(first + i) for i in range(OPERATIONS)]
    length = HISTORY + 1
    return {
        "arrival": per_operation(lambda i: cache.arrive(ids[i], users[i])),
        "look-up": per_operation(lambda i: cache.find_hit(ids[i], users[i], length) and None),
        "start": per_operation(lambda i: cache.start(ids[i], users[i], 0, 0)),
        "end": per_operation(lambda i: cache.finish(ids[i], length, blocks_of(HISTORY))),
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def measure(num_users: int) -> dict[str, float]:
    gc.collect()
    before = resident_bytes()
    cache = UserCache(BLOCK_SIZE, 10 * num_users, CountingPool(), CacheSettings(max_users=0))
    for number in range(num_users):
        serve(cache, number, lookup(number))
    gc.collect()
    per_user = (resident_bytes() - before) / num_users - 4 * HISTORY
    rng = random.Random(0)
    known = [lookup(number) for number in rng.sample(range(num_users), OPERATIONS // 20)] * 20
    fresh = [lookup(num_users + i) for i in range(OPERATIONS)]
    figures = {"bytes per user beyond its tokens": per_user}
    for what, users, first in (("known", known, 10**9), ("new", fresh, 2 * 10**9)):
        # Those who are known come many times at once; what each request does is the same.
        for stage, microseconds in stages(cache, users, first).items():
            figures[f"us, {stage} of a {what} user"] = microseconds
    figures["us, eviction"] = per_operation(lambda _: cache.make_room(len(blocks_of(HISTORY))) and None)
    return figures


def lookup_by_length() -> dict[str, float]:
    """Microseconds of a look-up by length of the history: one vectorised comparison."""
    cache = UserCache(BLOCK_SIZE, 10**6, CountingPool(), CacheSettings())
    figures = {}
    for length in (1_000, 4_000, 16_000, 64_000):
        user = CacheRequest(UserKey("u"), UserRequest("u", length), as_tokens([7] * length))
        serve(cache, length, user)
        history = as_tokens([7] * length)
        again = [CacheRequest(user.key, user.request, history) for _ in range(OPERATIONS)]
        figures[f"us, look-up of {length // 1000}k tokens"] = per_operation(
            lambda i, again=again, length=length: cache.find_hit("look-up", again[i], length + 1) and None
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and time of the user cache at up to a million users")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    # A process for each size: what an earlier size has freed would be taken again and not be counted.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        by_users = dict(zip(SIZES, processes.map(measure, SIZES), strict=True))
    by_length = lookup_by_length()
    if args.json:
        million = by_users[SIZES[-1]]
        figures = {
            "bytes_per_user": million["bytes per user beyond its tokens"],
            "slowest_us": max(value for name, value in million.items() if name.startswith("us, ")),
        }
        args.json.write_text(
            json.dumps({"figures": figures, "by_users": by_users, "by_length": by_length}, indent=1) + "\n"
        )
    smallest = by_users[SIZES[0]]
    print(f"| | {' | '.join(f'{size:,} users' for size in SIZES)} |\n|---|{'---:|' * len(SIZES)}")
    for name in smallest:
        cells = [f"{by_users[size][name]:.1f}" for size in SIZES]
        if name.startswith("us, "):  # The bytes of a thousand users drown in what the process had free.
            cells = [
                f"{cell} ({by_users[size][name] / smallest[name]:.2f}x)"
                for cell, size in zip(cells, SIZES, strict=True)
            ]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| history | us per look-up |\n|---|---:|")
    for name, value in by_length.items():
        print(f"| {name.removeprefix('us, look-up of ')} | {value:.1f} |")


if __name__ == "__main__":
    main()
