"""What a request costs in the scheduler's thread, by what is known of its user, and by length of the history.

    .venv/bin/python benchmarks/scheduler_cost.py --json FILE

No model: vLLM's scheduler, KV cache manager and block pool, with UserKV in them and without, and workers who are done
at once (``idle_workers.py``). The pool's look-ups, saves and commits go over the RPC to a server in another process.
For each path and length, over all steps of a request from its arrival to the step after its end:

- time within UserKV, which is all calls by which vLLM's scheduler enters it, added up: *look-up*, until the request has
  its blocks; *keep*, from then on: what it leaves in HBM and in the pool; *step*, what each step of the engine costs
  once, whatever its number of requests (a request here has two to five steps of its own);
- *thread*: time within the scheduler, ``add_request`` + ``schedule`` + ``update_from_output``, and the same for stock
  vLLM with prefix caching and the same request, hit or missed likewise;
- *input*: time to make the request in the engine's input thread; vLLM hashes its blocks there;
- *answer*: from the request's arrival until the pool's answer is there.

The clocks within UserKV cost time, too, so they run in every other round, and *thread* is of the rounds without them.
The machine's own p99 is measured in the same run: a loop of Python that takes as long, and does nothing else.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from idle_workers import Engine, attach_pool, config_of, make_scheduler, pool_of, wait_for
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core as engine_core

LENGTHS = (1024, 4096, 16384, 65536)
CANDIDATES = 128
MAX_MODEL_BLOCKS = 547
ORDINARY = 8
"""Ordinary requests that decode together."""

MANAGER_CALLS = {"arrived": "lookup", "must_wait": "lookup"}
COORDINATOR_CALLS = {
    "find_user_cache_hit": "lookup",
    "start_user_request": "lookup",
    "start_ordinary_request": "keep",
    "evict_for_prefixes": "keep",
    "finish_request": "keep",
}
USERS_CALLS = {"requests_to_keep": "step", "keep_history": "keep", "evict_ahead": "keep", "make_room": "keep"}
CONNECTOR_CALLS = {
    "on_new_request": "lookup",
    "get_num_new_matched_tokens": "lookup",
    "update_state_after_alloc": "lookup",
    "get_external_cache_hit_sources": "lookup",
    "update_connector_output": "step",
    "request_finished_all_groups": "keep",
    "has_pending_block_frees": "step",
    "has_pending_push_work": "step",
    "get_kv_connector_stats": "step",
}


class Stopwatch:
    """Adds up the time within some functions, by what they are for; a call within another one counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reset(running=False)

    def reset(self, running: bool) -> None:
        """Start again at zero, or stay away from what is measured otherwise."""
        self.seconds = dict.fromkeys(("lookup", "keep", "step"), 0.0)
        self._idle = not running

    def watch(self, owner: Any, purposes: dict[str, str]) -> None:
        """Replace ``owner``'s functions by watched ones; ``purposes`` has their names."""
        for name, purpose in purposes.items():
            setattr(owner, name, self._watched(getattr(owner, name), purpose))

    def _watched(self, function: Callable[..., Any], purpose: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._idle:
                return function(*args, **kwargs)
            self._idle = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[purpose] += time.perf_counter() - start
                self._idle = False

        return watched


@dataclass
class Systems:
    """The engines that are compared, and the users of each length."""

    stock: Engine
    users: Engine
    pool: Engine
    watch: Stopwatch
    histories: dict[int, list[int]]

    def request(self, engine: Engine, name: str, user: str, history: list[int]) -> Any:
        candidates = [hash((name, i)) % 1000 for i in range(CANDIDATES)]
        params = {"user_id": user, "history_len": len(history)} if engine is not self.stock else None
        start = time.perf_counter()
        request = engine.request(name, history + candidates, user=params)
        self.input_seconds = time.perf_counter() - start
        return request


def watch_users(watch: Stopwatch, scheduler: Any) -> None:
    """Watch every place by which vLLM's scheduler enters UserKV."""
    manager = scheduler.kv_cache_manager
    watch.watch(manager, MANAGER_CALLS)
    watch.watch(manager.coordinator, COORDINATOR_CALLS)
    watch.watch(manager.users, USERS_CALLS)
    if scheduler.connector is not None:
        watch.watch(scheduler.connector, CONNECTOR_CALLS)
        # Of what is done once a step, this part is for the requests: their saves begin and end in it.
        watch.watch(scheduler.connector, {"build_connector_meta": "keep"})


def run(systems: Systems, engine: Engine, request: Any, watched: bool) -> dict[str, float]:
    """One request from arrival to end, and the step after it. Returns seconds: within UserKV or, unwatched, in all."""
    systems.watch.reset(watched)
    engine.seconds = engine.cpu = 0.0
    figures = {"input": systems.input_seconds}
    start = time.perf_counter()
    engine.add(request)
    for step in range(6):
        output = engine.step()
        for new in output.scheduled_new_reqs:
            figures["cached"] = new.num_computed_tokens
        if request.request_id in output.finished_req_ids:
            break
        if engine is systems.pool and step == 0 and not output.num_scheduled_tokens:
            wait_for_answer(engine, request.request_id)
            figures["answer"] = time.perf_counter() - start
    else:
        raise RuntimeError(f"{request.request_id} does not end")
    if engine is systems.pool:
        saves = engine.scheduler.connector._scheduler._saves
        if len(saves):
            wait_for(lambda: not len(saves))
            engine.step()
    if watched and engine is not systems.stock:
        return figures | systems.watch.seconds
    return figures | {"thread": engine.seconds, "cpu": engine.cpu}


def wait_for_answer(engine: Engine, request_id: str) -> None:
    """Sleep until the pool has said what it has of a request's user."""
    asking = engine.scheduler.connector._scheduler._requests[request_id]
    wait_for(lambda: asking.answer is not None)


def leave_hbm(engine: Engine) -> None:
    """Every user leaves HBM."""
    table = engine.scheduler.kv_cache_manager.users.table
    for key in list(table.user_to_blocks):
        table.drop(key)


def round_of(systems: Systems, length: int, number: int) -> dict[str, dict[str, float]]:
    """Each path once."""
    history, name = systems.histories[length], f"{length}-{number}"
    new = [number, length, *history[2:]]

    def once(engine: Engine, path: str, tokens: list[int], user: str) -> None:
        request = systems.request(engine, f"{path}-{name}", user, tokens)
        result[path] = run(systems, engine, request, watched=number % 2 == 1)

    result: dict[str, dict[str, float]] = {}
    once(systems.stock, "stock miss", new, "")
    once(systems.stock, "stock hit", new, "")
    once(systems.users, "miss, no pool", new, f"new-{name}")
    once(systems.users, "HBM hit, no pool", new, f"new-{name}")
    once(systems.pool, "pool hit", history, f"user-{length}")
    once(systems.pool, "HBM hit", history, f"user-{length}")
    once(systems.pool, "miss and save", new, f"new-{name}")
    leave_hbm(systems.users)
    leave_hbm(systems.pool)
    expected = {"pool hit": length, "HBM hit": length, "HBM hit, no pool": length}
    for path, figures in result.items():
        wanted = expected.get(path, length // 128 * 128 if path == "stock hit" else 0)
        assert figures.pop("cached") == wanted, f"{path} of {length} tokens hit otherwise"
    return result


def ordinary(engine: Engine, number: int) -> list[float]:
    """Seconds of each decoding step with some requests that have no user."""
    prompts = [[(number * 31 + i * 7 + j) % 5000 for j in range(200)] for i in range(ORDINARY)]
    for i, prompt in enumerate(prompts):
        engine.add(engine.request(f"ordinary-{number}-{i}", prompt, max_tokens=33))
    engine.step()
    steps = []
    for _ in range(31):
        engine.seconds = 0.0
        engine.step()
        steps.append(engine.seconds)
    engine.step()
    engine.step()
    assert not engine.scheduler.requests
    return steps


def empty_loop(turns: int = 1500) -> float:
    """Seconds of some Python that nothing disturbs but the machine."""
    start = time.perf_counter()
    total = 0
    for i in range(turns):
        total += i
    return time.perf_counter() - start


def make_systems(endpoint: str, pipe: Connection, block_size: int) -> Systems:
    """The three engines; stock vLLM first, since UserKV's patches are of this whole process."""
    from userkv.engine import output_tiers
    from userkv.engine import scheduler as scheduler_of_ours
    from userkv.engine.vllm_compat import patches

    num_blocks = 4 * MAX_MODEL_BLOCKS * (128 // block_size)
    kv_cache_utils.init_none_hash(sha256)
    stock = Engine(
        make_scheduler(config_of(False, block_size, num_blocks)),
        engine_core.get_request_block_hasher(block_size, sha256),
    )
    os.environ["KV_MANAGER_FOR_GR"] = "1"
    patches.install()
    hasher = engine_core.get_request_block_hasher(block_size, sha256)
    users = Engine(make_scheduler(config_of(False, block_size, num_blocks)), hasher)
    pool = Engine(make_scheduler(config_of(True, block_size, num_blocks)), hasher)
    namespace = attach_pool(pool, endpoint, pipe)
    systems = Systems(stock, users, pool, Stopwatch(), {length: list(range(length)) for length in LENGTHS})
    for length, history in systems.histories.items():
        pipe.send((f"user-{length}", namespace, history))
        pipe.recv()
    systems.watch.watch(scheduler_of_ours, {"attach_snapshot": "step"})
    systems.watch.watch(output_tiers, {"attach": "keep"})
    watch_users(systems.watch, users.scheduler)
    watch_users(systems.watch, pool.scheduler)
    return systems


def measure(repeat: int, block_size: int) -> dict[str, Any]:
    """All figures, interleaved."""
    samples: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    empty: list[float] = []
    with pool_of(block_size) as (endpoint, pipe):
        systems = make_systems(endpoint, pipe, block_size)
        for number in range(repeat + 3):
            if number == 3:  # Warm now; and as vLLM's engine does when it has started.
                samples.clear()
                steps.clear()
                gc.collect()
                gc.freeze()
            for length in LENGTHS:
                for path, figures in round_of(systems, length, number).items():
                    samples[length, path].append(figures)
                    empty.append(empty_loop())
            systems.watch.reset(running=False)
            for name, engine in (("stock", systems.stock), ("users", systems.users), ("pool", systems.pool)):
                steps[name] += ordinary(engine, number)
        systems.pool.scheduler.connector.shutdown()
    return {
        "requests": [
            {"path": path, "history_tokens": length} | _figures(values) for (length, path), values in samples.items()
        ],
        "ordinary_step_us": {name: _spread(values) for name, values in steps.items()},
        "empty_loop_us": _spread(empty),
    }


def _figures(values: list[dict[str, float]]) -> dict[str, Any]:
    names = dict.fromkeys(name for value in values for name in value)
    return {f"{name}_us": _spread([value[name] for value in values if name in value]) for name in names}


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50": statistics.median(ordered) * 1e6, "p99": ordered[int(0.99 * (len(ordered) - 1))] * 1e6}


def _cell(spread: dict[str, float] | None) -> str:
    return "" if spread is None else f"{spread['p50']:.0f} ({spread['p99']:.0f})"


def table(figures: dict[str, Any]) -> str:
    """The figures in Markdown."""
    columns = ("lookup", "keep", "step", "thread", "input", "answer")
    lines = [f"| path | history | {' | '.join(columns)} |", "|---|---:|" + "---:|" * len(columns)]
    for row in sorted(figures["requests"], key=lambda row: (row["path"], row["history_tokens"])):
        cells = [_cell(row.get(f"{name}_us")) for name in columns]
        lines.append(" | ".join((f"| {row['path']}", str(row["history_tokens"]), *cells)) + " |")
    lines.append("\nMicroseconds, median (p99).")
    lines += ["", "| step of 8 ordinary requests | p50 | p99 |", "|---|---:|---:|"]
    for name, spread in figures["ordinary_step_us"].items():
        lines.append(f"| {name} | {spread['p50']:.1f} us | {spread['p99']:.1f} us |")
    empty = figures["empty_loop_us"]
    return "\n".join([*lines, "", f"A loop that does nothing: p50 {empty['p50']:.0f} us, p99 {empty['p99']:.0f} us."])


def summary(figures: dict[str, Any]) -> dict[str, float]:
    """UserKV's look-ups in one figure each: the worst p99, and how the median of an HBM hit grows with the history."""
    ours = [row for row in figures["requests"] if "lookup_us" in row]
    hits = {row["history_tokens"]: row["lookup_us"]["p50"] for row in ours if row["path"].startswith("HBM hit, no")}
    return {
        "worst_p99_us": max(row["lookup_us"]["p99"] for row in ours),
        "hit_p99_us": max(row["lookup_us"]["p99"] for row in ours if row["path"].startswith("HBM hit")),
        "growth": hits[max(hits)] / hits[min(hits)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeat",
        type=int,
        default=400,
        help="requests per path and length; half of them give UserKV's own time (default: %(default)s)",
    )
    parser.add_argument("--block-size", type=int, default=128, help="tokens per block (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    figures = measure(args.repeat, args.block_size)
    print(table(figures))
    if args.json:
        args.json.write_text(json.dumps({"figures": summary(figures)} | figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
