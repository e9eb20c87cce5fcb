"""What runs of the benchmark suite report, without running one."""

from collections.abc import Mapping
from typing import Any

from benchmarks.suite.policies import APC, BELADY, BELADY_WHOLE
from benchmarks.suite.scenarios import SCENARIOS

from userkv.cache.policies import POLICIES


def run_report(speed: float = 10.0, **pool: float) -> dict[str, Any]:
    """As ``run_system`` returns it; of the pool, what is named."""
    counters = dict.fromkeys(("put_bytes", "got_bytes", "objects", "used_bytes"))
    return {
        "total": {"hit_ratio": speed / 100, "requests_per_s": speed},
        "ranking": {"ttft_p50_s": 1 / speed, "ttft_p99_s": 2 / speed, "latency_p99_s": 3 / speed},
        "cpu_seconds": 7 * speed,
        "pool": counters | pool,
    }


SPEEDS = {
    "no-cache": 2.0,
    "apc": 4.0,
    "offloading": 10.0,
    "mooncake-store-connector": 8.0,
    "lmcache": 5.0,
    "userkv-hbm": 6.0,
    "userkv-local": 20.0,
    "userkv-mooncake": 16.0,
    "userkv-layerwise": 12.0,
}
"""Requests per second that :func:`results` says."""

PUT_BYTES = {"mooncake-store-connector": 4 << 30, "userkv-mooncake": 1 << 30}


def figures_of_system(name: str) -> dict[str, Any]:
    """A system's entry in the results: three runs, one a tenth slower and one a tenth faster."""
    speed = SPEEDS[name]
    medians: dict[str, float] = {
        "hit_ratio": speed / 100,
        "requests_per_s": speed,
        "ttft_p50_s": 1 / speed,
        "ttft_p99_s": 2 / speed,
        "latency_p99_s": 3 / speed,
        "cpu_seconds": 7 * speed,
    }
    if name in PUT_BYTES:
        medians["put_bytes"] = PUT_BYTES[name]
    spreads = {
        figure: {"median": value, "least": 0.9 * value, "most": 1.1 * value, "runs": 3}
        for figure, value in medians.items()
    }
    return {"requests": 100, "figures": spreads, "runs": [medians] * 3}


def results() -> dict[str, Any]:
    """A whole run of the suite, as its JSON file has it, but for the goals."""
    policies: Mapping[str, float] = dict(zip(POLICIES, (0.05, 0.04, 0.03), strict=True))
    hbm = {APC: 0.02, **policies, BELADY_WHOLE: 0.08, BELADY: 0.1}
    return {
        "userkv_bench": 1,
        "machine": {"processor": "A processor", "cores": 2, "memory_bytes": 16 << 30},
        "versions": {"userkv": "1.2.3"},
        "scenarios": [
            {
                "name": scenario.name,
                "title": scenario.title,
                "requests": scenario.requests,
                "concurrency": scenario.concurrency,
                "sizes": {"hbm_blocks": 189, "block_size": 128, "pool_bytes": scenario.pool_bytes},
                "systems": {
                    name: figures_of_system(name) | {"requests": scenario.requests}
                    for name in scenario.systems
                    if name != "lmcache"
                },
                "last_run": {
                    "date": "2026-01-02",
                    "command": "make bench",
                    "commit": "1234567",
                },
                "left_out": {name: "it is not installed" for name in scenario.systems if name == "lmcache"},
            }
            for scenario in SCENARIOS
        ],
        "policies": [
            {
                "workload": "gr",
                "title": "64 users",
                "requests": 2000,
                "hbm_blocks": 188,
                "hbm": {"1": {name: 2 * ratio for name, ratio in hbm.items()}, "8": hbm},
                "pool": {"0.65": {"lru over lru": 0.11, BELADY: 0.12}},
            }
        ],
        "micro": {
            "pool_bandwidth": {"get_dram_ratio": {"median": 0.95}},
            "pool_bandwidth_mooncake": {"get_tcp_ratio": 0.85},
            "scheduler_cost": {"worst_p99_us": 40.0, "growth": 1.5},
            "table_scale": {"bytes_per_user": 380.0, "slowest_us": 12.0},
            "layerwise_overlap": {"mooncake_share_hidden": 0.9},
        },
    }
