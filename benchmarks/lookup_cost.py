"""What a pool look-up costs in the scheduler's thread, and how long its answer takes, by length of the history.

    .venv/bin/python benchmarks/lookup_cost.py --json FILE

No engine: the connector's scheduler half, the RPC over a Unix socket to a server in another process, and a local pool
behind it are the real ones. "Thread" is the time that one request's calls take together in the scheduler's thread:
asking, looking at the answer, planning the load. The yardstick of the same run is hashing the history's blocks with
SHA-256, which is what vLLM's prefix cache does for a request.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

from userkv.core.keys import pool_uid
from userkv.core.policies.lru import UserKVLRUManager
from userkv.core.request import UserKey, UserRequest
from userkv.core.save_plan import plan_save
from userkv.core.settings import CacheSettings
from userkv.core.user_cache import UserCache, UserLookup
from userkv.engine.pool.agreement import AgreedPool
from userkv.engine.pool.answers import answer
from userkv.engine.pool.lookup_rpc import MooncakeLookupClient, MooncakeLookupServer
from userkv.engine.pool.scheduler_half import SchedulerHalf
from userkv.store.local import LocalBackend
from userkv.store.regions import region_of
from userkv.store.user_store import MooncakeUserStore

LENGTHS = (1024, 4096, 16384, 65536)
BLOCK_SIZE = 128
BLOCKS_PER_EXTENT = 16
"""16 MiB of 8 KiB per token."""

NAMESPACE = "bench"


class NoBlocks:
    """A block pool for a cache that stays empty."""

    def touch(self, blocks: Any) -> None:
        raise AssertionError("nothing is kept here")

    free_blocks = touch


def user_of(length: int) -> UserLookup:
    history = np.arange(length, dtype=np.int32)
    history.flags.writeable = False
    return UserLookup(UserKey(f"user-{length}"), UserRequest(f"user-{length}", length), history)


def serve(endpoint: str, ready: Connection) -> None:
    """A worker's side of the RPC, with a user of each length in its pool. Extents are a byte: nothing loads them."""
    backend = LocalBackend(64 << 20, None, 0)
    store = MooncakeUserStore(backend, 1, 0)
    byte = bytearray(1)
    for length in LENGTHS:
        user = user_of(length)
        ids = iter(range(length))
        plan = plan_save(
            None,
            user.history,
            BLOCK_SIZE,
            max_extent_blocks=BLOCKS_PER_EXTENT,
            new_id=lambda ids=ids: next(ids),
            writer="bench",
            now=time.time(),
        )
        assert plan is not None
        for extent in plan.new_extents:
            store.put_extent(pool_uid(user.key), NAMESPACE, extent, [region_of(byte)])
        assert store.commit(pool_uid(user.key), NAMESPACE, plan.record, 0).committed
    server = MooncakeLookupServer(endpoint, lambda call: answer(store, call))
    ready.send(True)
    ready.recv()
    server.close()
    backend.close()


def one_request(half: SchedulerHalf, users: UserCache, user: UserLookup, name: str) -> tuple[float, float]:
    """Seconds in the scheduler's thread, and seconds until the answer was there."""
    length = len(user.history)
    blocks = list(range(length // BLOCK_SIZE + 1))
    start = time.perf_counter()
    half.new_request(name, user, length + 8)
    thread = time.perf_counter() - start
    while True:
        users.find(name, user, length + 8)
        at = time.perf_counter()
        tokens = half.find(name, length + 8, 0)
        now = time.perf_counter()
        if tokens is not None:
            break
        thread += now - at
        time.sleep(0.0001)
    thread += now - at
    answered = now - start
    assert tokens == length
    at = time.perf_counter()
    half.allocated(name, blocks, tokens)
    thread += time.perf_counter() - at
    half.finished(name)
    half.take_jobs()
    half.loaded(dict.fromkeys(half._loads._running, (1, True)))
    return thread, answered


def hashing(user: UserLookup) -> float:
    """Seconds that vLLM's prefix cache takes to hash the history's blocks."""
    tokens = user.history.tolist()
    start = time.perf_counter()
    parent = None
    for at in range(0, len(tokens), BLOCK_SIZE):
        parent = hash_block_tokens(sha256, parent, tokens[at : at + BLOCK_SIZE], None)
    return time.perf_counter() - start


def measure(repeat: int) -> list[dict[str, float]]:
    """Rows for all lengths, interleaved."""
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{Path(directory) / 'bench' / 'socket'}"
        (Path(directory) / "bench").mkdir()
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(endpoint, theirs))
        process.start()
        mine.recv()
        client = MooncakeLookupClient([endpoint], 5.0, lambda rank, notice: None)
        users = UserCache(BLOCK_SIZE, 10_000, NoBlocks(), CacheSettings(), UserKVLRUManager())
        half = SchedulerHalf(
            AgreedPool(client), users, None, None, BLOCK_SIZE, lambda key, adapter: NAMESPACE, lambda: None
        )
        samples: dict[int, list[tuple[float, float, float]]] = {length: [] for length in LENGTHS}
        for number in range(repeat):
            for length in LENGTHS:
                user = user_of(length)
                samples[length].append((*one_request(half, users, user, f"{length}-{number}"), hashing(user)))
        client.close()
        mine.send(True)
        process.join()
    return [row(length, values) for length, values in samples.items()]


def row(length: int, values: list[tuple[float, float, float]]) -> dict[str, float]:
    thread, answered, hashed = (sorted(column) for column in zip(*values, strict=True))
    p99: Callable[[list[float]], float] = lambda column: column[int(0.99 * (len(column) - 1))]  # noqa: E731
    return {
        "history_tokens": length,
        "thread_p50_us": statistics.median(thread) * 1e6,
        "thread_p99_us": p99(thread) * 1e6,
        "answer_p50_us": statistics.median(answered) * 1e6,
        "answer_p99_us": p99(answered) * 1e6,
        "thread_to_hashing": statistics.median(thread) / statistics.median(hashed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=300, help="requests per length (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    rows = measure(args.repeat)
    print("| history | thread p50 | thread p99 | answer p50 | answer p99 | thread / hashing |")
    print("|---:|---:|---:|---:|---:|---:|")
    for figures in rows:
        print(
            f"| {figures['history_tokens']} | {figures['thread_p50_us']:.0f} us | {figures['thread_p99_us']:.0f} us "
            f"| {figures['answer_p50_us']:.0f} us | {figures['answer_p99_us']:.0f} us "
            f"| {figures['thread_to_hashing']:.3f} |"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
