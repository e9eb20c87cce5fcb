"""The pool's connector in vLLM's real scheduler: loads that are late or fail, saves, evictions, a pool that is down."""

from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.unit.engine.test_oracle import EXAMPLES, GRTraffic
from userkv.cache.stats import UserCacheStats


class PoolTraffic(GRTraffic):
    """The same traffic, with a pool in which everything happens that can."""

    pool = "async"

    @rule(
        event=st.sampled_from(
            ["down", "up", "up", "loads fail", "saves fail", "all is well", "all is well", "lose", "lose", "empty HBM"]
        )
    )
    def disturb(self, event: str) -> None:
        pool = self.engine.oracle_pool
        if event == "lose":
            pool.lose()
        elif event == "empty HBM":
            while self.engine.users.table.evict(10**9):
                pass
        elif event in ("down", "up"):
            pool.down = event == "down"
        else:
            pool.failing_loads = event == "loads fail"
            pool.failing_saves = event == "saves fail"


def machine(how: str, scheduling: bool) -> type[PoolTraffic]:
    return type("Machine", (PoolTraffic,), {"pool": how, "async_scheduling": scheduling})


# Loads within a step are refused with asynchronous scheduling (tests/unit/engine/test_supported_engines.py).
@pytest.mark.parametrize(
    ("how", "async_scheduling"), [("async", False), ("async", True), ("sync", False), ("layerwise", False)]
)
@pytest.mark.parametrize("single_flight_ms", [0, 5000])
def test_no_request_ever_reads_wrong_kv(
    how: str, async_scheduling: bool, single_flight_ms: int, patched_vllm: pytest.MonkeyPatch
) -> None:
    patched_vllm.setenv("USERKV_SINGLE_FLIGHT_MAX_WAIT_MS", str(single_flight_ms))
    patched_vllm.setenv("VLLM_USER_KV_LRU_MAX_USERS", "2")
    run_state_machine_as_test(
        machine(how, async_scheduling),
        settings=settings(
            max_examples=EXAMPLES // 2,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.parametrize("how", ["async", "sync", "layerwise"])
def test_a_request_whose_load_fails_counts_once(how: str, patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    engine = OracleEngine(40, async_scheduling=False, pool=how)
    engine.add([2, 3, 4, 1] * 5, 1, {"user_id": "a"})
    engine.drain()
    assert engine.users.table.evict(10**9)
    patched_vllm.setattr(UserCacheStats, "take", asdict)  # Nothing is reset.
    before = engine.users.stats.take()
    loads = engine.oracle_pool.loads_done
    patched_vllm.setattr(engine.oracle_pool, "_load", lambda job: 0)
    engine.add([2, 3, 4, 1] * 5, 1, {"user_id": "a"})
    engine.drain()
    assert engine.oracle_pool.loads_done == loads + 1
    counted = {name: count - before[name] for name, count in engine.users.stats.take().items()}
    assert (counted["history_tokens"], counted["hit_tokens"]) == (20, 0)
    assert (counted["user_hits"], counted["user_misses"]) == (0, 1)


def test_new_weights_while_a_save_is_under_way(patched_vllm: pytest.MonkeyPatch) -> None:
    """vLLM must be able to forget ordinary requests' KV, too, although a save holds blocks."""
    from tests.support.oracle import OracleEngine

    engine = OracleEngine(40, async_scheduling=False, pool="async")
    engine.add([1, 2, 3, 4] * 5)
    engine.drain()
    engine.oracle_pool.end_step = lambda everything: ({}, set(), set())  # type: ignore[method-assign]
    engine.add([2, 3, 4, 1] * 5, 1, {"user_id": "a"})
    while engine.unfinished():
        engine.step()
    engine.step()
    assert engine._saves.held_blocks()
    assert engine.reset(running_too=False)
    assert not engine._saves.held_blocks()
    again = engine.add([1, 2, 3, 4] * 5)
    while engine.unfinished():
        engine.step()
    assert engine.cached[again] == 0
