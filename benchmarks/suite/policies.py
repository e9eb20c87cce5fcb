"""Every eviction policy on every workload, simulated, against vLLM's prefix cache and Belady's optimum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.suite.scenarios import BLOCK_SIZE, GR, QUICK_SCENARIOS, SCENARIOS, sizes_of
from benchmarks.suite.workloads import TOKENS_PER_ITEM
from userkv.cache.policies import POLICIES, make_policy
from userkv.cache.policies.policy import EvictionPolicy
from userkv.core.request import UserKey
from userkv.logs.work_request import WorkRequest
from userkv.sim.apc import ApcSimulation
from userkv.sim.belady import BeladyPolicy
from userkv.sim.hbm import HbmSimulation
from userkv.sim.pool import PoolSimulation
from userkv.sim.trace import SimRequest

APC, BELADY, BELADY_WHOLE = "apc", "belady", "belady, whole users"

SIMULATED = {
    "gr": 2000,
    "growing": 2000,
    "bursts": 2000,
    "drifting": 3000,
    "published": 3000,
    "candidates": 1000,
    "movielens": 3000,
    "otto": 400,
}
"""Scenario -> requests. The others' requests are those of one of these, or come from users who do not come back, or
name no user: what those hit by hashes beside the users, the simulation of users does not know."""

WAITING = (0, 2, 6)
"""Requests that wait, for the simulation of what it is worth to spare their users."""

POOL_SHARES = (0.65, 0.33)
"""Room in the pool, as a share of what all histories take."""


def sim_requests(requests: Iterable[WorkRequest]) -> list[SimRequest]:
    """The same requests with tokens instead of items, which need not be a model's."""
    histories: dict[str, list[int]] = {}
    made = []
    for request in requests:
        history = histories.setdefault(request.user, [])
        history += request.new_items
        del history[: request.drop]
        tokens = np.repeat(np.array(history, dtype=np.int32), TOKENS_PER_ITEM)
        tokens.flags.writeable = False
        made.append(SimRequest(request.user, tokens, TOKENS_PER_ITEM * len(request.candidates)))
    return made


def simulate_policies(data: Path, quick: bool, concurrency: Sequence[int], progress: bool) -> list[dict[str, Any]]:
    """For each workload: hit ratios in tokens, by policy, in HBM alone and in a pool under HBM.

    Args:
        data: directory of the logs; without it, workloads of logs are left out.
        quick: only what the goals need, with as many requests as the engines get in a quick run.
        concurrency: requests that hold blocks at a time, each in turn.
        progress: show a bar.

    """
    rows = []
    wanted = [(each, SIMULATED[each.name]) for each in SCENARIOS if each.name in SIMULATED]
    if quick:
        wanted = [(each, each.requests) for each in QUICK_SCENARIOS if each.name == GR]
    there = [each for each in wanted if data.is_dir() or not each[0].needs_data]
    for scenario, number in tqdm(there, unit="workload", disable=not progress):
        work = list(scenario.make(data, number))
        blocks = sizes_of(scenario, work).hbm_blocks - 1
        requests = sim_requests(work)
        room = {share: int(share * _all_blocks(requests)) for share in POOL_SHARES}
        rows.append(
            {
                "workload": scenario.name,
                "title": scenario.title,
                "requests": len(requests),
                "hbm_blocks": blocks,
                "hbm": {str(running): _hbm(requests, blocks, running) for running in concurrency},
                "waiting": {str(ahead): _hbm_waiting(requests, blocks, ahead) for ahead in WAITING},
                "pool": {f"{share:g}": _pool(requests, blocks, room[share], concurrency[-1]) for share in POOL_SHARES},
            }
        )
    return rows


def _hbm(requests: Sequence[SimRequest], blocks: int, running: int) -> dict[str, float]:
    def ratio(policy: EvictionPolicy[UserKey], whole_users: bool = False) -> float:
        return HbmSimulation(BLOCK_SIZE, blocks, policy, running, whole_users).run(requests).hit_ratio

    future = [UserKey(request.user) for request in requests]
    return {
        APC: ApcSimulation(BLOCK_SIZE, blocks, running).run(requests).hit_ratio,
        **{name: ratio(make_policy(name, blocks)) for name in POLICIES},
        BELADY_WHOLE: ratio(BeladyPolicy(future), whole_users=True),
        BELADY: ratio(BeladyPolicy(future)),
    }


def _hbm_waiting(requests: Sequence[SimRequest], blocks: int, waiting: int) -> dict[str, float]:
    """With requests that the scheduler knows before their turn, one at a time."""
    return {
        name: HbmSimulation(BLOCK_SIZE, blocks, make_policy(name, blocks), waiting=waiting).run(requests).hit_ratio
        for name in POLICIES
    }


def _pool(requests: Sequence[SimRequest], blocks: int, room: int, running: int) -> dict[str, float]:
    def ratio(hbm: EvictionPolicy[UserKey], pool: EvictionPolicy[UserKey], sees_all: bool = False) -> float:
        above = HbmSimulation(BLOCK_SIZE, blocks, hbm, running)
        return PoolSimulation(BLOCK_SIZE, room, above, pool, sees_all).run(requests).hit_ratio

    future = [UserKey(request.user) for request in requests]
    return {
        **{
            f"{hbm} over {pool}": ratio(make_policy(hbm, blocks), make_policy(pool, room))
            for hbm in POLICIES
            for pool in POLICIES
        },
        BELADY: ratio(BeladyPolicy(future), BeladyPolicy(future), sees_all=True),
    }


def _all_blocks(requests: Sequence[SimRequest]) -> int:
    longest: dict[str, int] = {}
    for request in requests:
        longest[request.user] = max(longest.get(request.user, 0), len(request.history))
    return sum(-(-length // BLOCK_SIZE) for length in longest.values())
