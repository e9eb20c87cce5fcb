"""The user cache at up to a million users: memory per user, time per operation.

    .venv/bin/python benchmarks/table_scale.py --json

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

import numpy as np

from userkv.core.request import UserKey, UserRequest
from userkv.core.settings import CacheSettings
from userkv.core.tokens import as_tokens
from userkv.core.user_cache import UserCache, UserLookup

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BLOCK_SIZE = 128
HISTORY = 200
OPERATIONS = 20_000


class CountingPool:
    """The least a block pool must do."""

    def __init__(self) -> None:
        self.references = 0

    def touch(self, blocks: Sequence[int]) -> None:
        self.references += len(blocks)

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        self.references -= sum(1 for _ in ordered_blocks)


def lookup(number: int, tokens: int = HISTORY) -> UserLookup:
    name = f"user-{number:09d}"
    history = np.full(tokens, number % 1000, np.int32)
    history.flags.writeable = False
    return UserLookup(UserKey(name), UserRequest(name, tokens), history)


def serve(cache: UserCache, number: int, user: UserLookup) -> None:
    """One request of a user, from look-up to end."""
    request_id = str(number)
    hit = cache.find(request_id, user, len(user.history) + 1)
    cache.start(request_id, user, hit.num_tokens, hit.num_tokens)
    blocks = [*hit.blocks[: hit.num_tokens // BLOCK_SIZE]]
    needed = -(-len(user.history) // BLOCK_SIZE)
    blocks += [2 * number + i for i in range(needed - len(blocks))]
    cache.finish(request_id, len(user.history) + 1, blocks)


def per_operation(work: Callable[[int], None]) -> float:
    """Median microseconds of an operation over batches of 100."""
    times = []
    for batch in range(0, OPERATIONS, 100):
        start = time.perf_counter()
        for i in range(batch, batch + 100):
            work(i)
        times.append((time.perf_counter() - start) * 1e4)
    return float(np.median(times))


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
    known = [lookup(rng.randrange(num_users)) for _ in range(OPERATIONS)]
    fresh = [lookup(num_users + i) for i in range(OPERATIONS)]
    requests = iter(range(num_users, 10**9))
    figures = {
        "bytes per user beyond its tokens": per_user,
        "us, look-up": per_operation(lambda i: cache.find("look-up", known[i], HISTORY + 1) and None),
        "us, request of a known user": per_operation(lambda i: serve(cache, next(requests), known[i])),
        "us, request of a new user": per_operation(lambda i: serve(cache, next(requests), fresh[i])),
        "us, eviction": per_operation(lambda _: cache.make_room(1) and None),
    }
    assert len(cache.table) <= num_users + OPERATIONS
    return figures


def lookup_by_length() -> dict[str, float]:
    """Microseconds of a look-up by length of the history: one vectorised comparison."""
    cache = UserCache(BLOCK_SIZE, 10**6, CountingPool(), CacheSettings())
    figures = {}
    for length in (1_000, 4_000, 16_000, 64_000):
        user = UserLookup(UserKey("u"), UserRequest("u", length), as_tokens([7] * length))
        serve(cache, length, user)
        again = UserLookup(UserKey("u"), UserRequest("u", length), as_tokens([7] * length))
        figures[f"us, look-up of {length // 1000}k tokens"] = per_operation(
            lambda _, again=again, length=length: cache.find("look-up", again, length + 1) and None
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and time of the user cache at up to a million users")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    # A process for each size: what an earlier size has freed would be taken again and not be counted.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        by_users = dict(zip(SIZES, processes.map(measure, SIZES), strict=True))
    by_length = lookup_by_length()
    if args.json:
        print(json.dumps({"by_users": by_users, "by_length": by_length}, indent=1))
        return
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
