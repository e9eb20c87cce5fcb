"""vLLM's real scheduler and block pool with UserKV inside, against a worker that knows what every KV slot must hold."""

import contextlib
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from userkv.core.request import UserKey

EXAMPLES = int(os.environ.get("USERKV_FUZZ_EXAMPLES", "150"))
USERS = "abc"
tokens = st.integers(0, 4)


class GRTraffic(RuleBasedStateMachine):
    """Users whose histories grow, shrink, change and slide, beside ordinary requests, in a cache that is too small."""

    async_scheduling = False
    pool: str | None = None

    @initialize(
        num_blocks=st.integers(17, 40),
        threshold=st.sampled_from([0, 0, 5]),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(self, num_blocks: int, threshold: int, policy: str) -> None:
        from tests.support.oracle import OracleEngine

        self.engine = OracleEngine(num_blocks, self.async_scheduling, threshold, policy, self.pool)
        self.histories = {user: [i % 5 for i in range(length)] for user, length in zip(USERS, (30, 13, 8), strict=True)}
        self.prompts: dict[str, tuple[list[int], int]] = {}

    def submit(self, prompt: list[int], max_tokens: int, user: dict[str, Any] | None = None, **how: Any) -> None:
        request_id = self.engine.add(prompt, max_tokens, user, **how)
        self.prompts[request_id] = (prompt, max_tokens)

    @rule(
        user=st.sampled_from(USERS),
        change=st.sampled_from(["same", "same", "grow", "grow", "grow", "shrink", "edit", "slide", "new"]),
        where=st.integers(0, 50),
        more=st.lists(tokens, min_size=1, max_size=40),
        candidates=st.lists(tokens, max_size=12),
        max_tokens=st.integers(1, 4),
        switches=st.sampled_from([{}, {}, {}, {"read": False}, {"write": False}]),
        copies=st.sampled_from([1, 1, 1, 3]),
        skip_reading=st.sampled_from([False] * 5 + [True]),
        priority=st.integers(0, 2),
    )
    def user_request(
        self,
        user: str,
        change: str,
        where: int,
        more: list[int],
        candidates: list[int],
        max_tokens: int,
        switches: dict[str, bool],
        copies: int,
        skip_reading: bool,
        priority: int,
    ) -> None:
        history = list(self.histories[user])
        where = min(where, max(len(history) - 1, 0))
        if change == "grow":
            history += more[:6]
        elif change == "shrink":
            history = history[:where]
        elif change == "edit" and history:
            history[where] = more[0]
        elif change == "slide":
            history = history[where:]
        elif change == "new" or not history:
            history = more
        history = history[:48]
        self.histories[user] = history
        prompt = history + candidates or more
        for _ in range(copies):
            params = {"user_id": user, "history_len": len(history), **switches}
            self.submit(prompt, max_tokens, params, skip_reading=skip_reading, priority=priority)

    @rule(prompt=st.lists(tokens, min_size=1, max_size=6), times=st.integers(1, 8), max_tokens=st.integers(1, 8))
    def ordinary_request(self, prompt: list[int], times: int, max_tokens: int) -> None:
        self.submit(prompt * times, max_tokens)

    @rule(steps=st.integers(1, 6))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule(
        event=st.sampled_from(["abort"] * 5 + ["drain"] * 2 + ["new weights", "new weights, all preempted"]),
        which=tokens,
    )
    def interrupt(self, event: str, which: int) -> None:
        unfinished = self.engine.unfinished()
        if event == "drain":
            self.engine.drain()
        elif event.startswith("new weights"):
            with contextlib.suppress(RuntimeError):  # vLLM cannot preempt what waits for a load.
                self.engine.reset(running_too="preempted" in event)
        elif unfinished:
            request_id = unfinished[which % len(unfinished)]
            self.engine.abort(request_id)
            del self.prompts[request_id]

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        from tests.support.oracle import expected_output

        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        for request_id, (prompt, max_tokens) in self.prompts.items():
            assert self.engine.outputs[request_id] == expected_output(prompt, max_tokens)
        # With nothing running, a reset leaves no block held: nothing leaks.
        assert self.engine.reset(running_too=False)
        self.engine.check()


class AsyncGRTraffic(GRTraffic):
    async_scheduling = True


@pytest.mark.parametrize("machine", [GRTraffic, AsyncGRTraffic], ids=["sync", "async"])
@pytest.mark.parametrize("single_flight_ms", [0, 5000])
def test_no_request_ever_reads_wrong_kv(
    machine: type[GRTraffic], single_flight_ms: int, patched_vllm: pytest.MonkeyPatch
) -> None:
    patched_vllm.setenv("USERKV_SINGLE_FLIGHT_MAX_WAIT_MS", str(single_flight_ms))
    patched_vllm.setenv("VLLM_USER_KV_LRU_MAX_USERS", "2")
    patched_vllm.setenv("VLLM_USER_KV_LRU_MIN_FREE_BLOCKS", "3")
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.fixture
def engine(patched_vllm: pytest.MonkeyPatch) -> Any:
    """A cache of 16 blocks of 4 tokens: just enough for the longest request."""
    from tests.support.oracle import OracleEngine

    return OracleEngine(17, async_scheduling=False)


def ask(engine: Any, history: list[int], candidates: list[int], user: str = "a", max_tokens: int = 1) -> int:
    """Run one request to its end; how many tokens it had from the cache."""
    from tests.support.oracle import expected_output

    request_id = engine.add(history + candidates, max_tokens, {"user_id": user, "history_len": len(history)})
    engine.drain()
    assert engine.outputs[request_id] == expected_output(history + candidates, max_tokens)
    cached: int = engine.cached[request_id]
    return cached


HISTORY = [1, 2, 3, 4, 0, 2, 1, 3, 3, 1]


def test_hits_are_exact_to_the_token(engine: Any) -> None:
    assert ask(engine, HISTORY, [1, 1]) == 0
    assert ask(engine, HISTORY, [2, 2]) == 10
    assert ask(engine, [*HISTORY, 4], [2]) == 10
    assert ask(engine, [*HISTORY, 4], [0]) == 11
    assert ask(engine, HISTORY[:7], [2]) == 7
    assert ask(engine, [*HISTORY[:6], 0, *HISTORY[7:]], [2]) == 6


def test_without_candidates_the_last_token_is_computed(engine: Any) -> None:
    assert ask(engine, HISTORY, []) == 0
    assert ask(engine, HISTORY, []) == 9


def test_candidates_and_output_never_enter_the_cache(engine: Any) -> None:
    ask(engine, HISTORY, [1, 2, 3, 4], max_tokens=5)
    assert ask(engine, [*HISTORY, 1, 2, 3, 4], [0]) == 10
    assert len(engine.users.table.get(UserKey("a")).blocks) == 4


def test_one_user_never_reads_another(engine: Any) -> None:
    ask(engine, HISTORY, [1], user="a")
    assert ask(engine, HISTORY, [1], user="b") == 0
    ordinary = engine.add([*HISTORY, 1])
    engine.drain()
    assert engine.cached[ordinary] == 0


def test_users_do_not_read_what_ordinary_requests_left(engine: Any) -> None:
    engine.add([*HISTORY, 1])
    engine.drain()
    again = engine.add([*HISTORY, 1])
    engine.drain()
    assert engine.cached[again] == 8
    assert ask(engine, HISTORY, [1]) == 0


def test_kv_of_old_weights_is_not_kept_by_a_request_that_runs_through_a_reset(engine: Any) -> None:
    long_history = [i % 5 for i in range(40)]
    request_id = engine.add([*long_history, 1], 1, {"user_id": "a", "history_len": 40})
    engine.step()
    assert request_id in engine.unfinished()
    engine.reset(running_too=False)
    engine.drain()
    assert ask(engine, long_history, [1]) == 0
    assert ask(engine, long_history, [2]) == 40


def test_a_request_that_fills_the_cache_is_served_from_it(engine: Any) -> None:
    """The private copy of a partly valid block would be one block too many: the hit ends at the block before."""
    history = [i % 5 for i in range(50)]
    ask(engine, history, [])
    assert ask(engine, history, [1] * 12) == 48


def test_an_outdated_history_that_fills_the_cache_gives_way(engine: Any) -> None:
    ask(engine, [i % 5 for i in range(56)], [])
    changed = [0, 1, 2, 3, 4, *[2] * 45]
    assert ask(engine, changed, [1] * 10) == 5
    assert ask(engine, changed, [2] * 4) == 50


def test_an_aborted_request_leaves_what_it_computed_of_the_history(engine: Any) -> None:
    history = [i % 5 for i in range(40)]
    request_id = engine.add([*history, 1, 2], 1, {"user_id": "a", "history_len": 40})
    engine.step()
    engine.abort(request_id)
    assert ask(engine, history, [1]) == 24


def held(engine: Any) -> dict[str, int]:
    """Users in HBM, and how many of their tokens."""
    return {key.user_id: len(entry.tokens) for key, entry in engine.users.table.user_to_blocks.items()}


def test_running_users_are_not_evicted_and_of_idle_ones_the_least_worthy_loses_his_tail(engine: Any) -> None:
    for user in "abc":
        ask(engine, [ord(user) % 5, *HISTORY], [1], user=user)
    before = held(engine)
    ask(engine, [ord("a") % 5, *HISTORY], [2], user="a")
    ask(engine, [4] * 32, [1], user="d")
    after = held(engine)
    assert (after["a"], after["c"], after["d"]) == (before["a"], before["c"], 32)
    assert 0 < after["b"] < before["b"]
    ask(engine, [3] * 32, [1], user="e")
    assert "b" not in held(engine)


def test_users_whose_requests_wait_are_spared(engine: Any) -> None:
    for user in "abc":
        ask(engine, [ord(user) % 5, *HISTORY], [1], user=user)
    before = held(engine)
    running = engine.add([4] * 32, 1, {"user_id": "d"})
    waiting = engine.add([ord("a") % 5, *HISTORY, 1], 1, {"user_id": "a", "history_len": len(HISTORY) + 1})
    engine.drain()
    assert engine.cached[waiting] == before["a"]
    assert engine.cached[running] == 0
    assert held(engine)["b"] < before["b"]


def test_a_request_that_must_not_read_the_cache_does_not(engine: Any) -> None:
    """As with prompt_logprobs, for which vLLM needs each token computed."""
    ask(engine, HISTORY, [1])
    request_id = engine.add([*HISTORY, 2], 1, {"user_id": "a", "history_len": 10}, skip_reading=True)
    engine.drain()
    assert engine.cached[request_id] == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("first", [{}, {"write": False}, {"read": False}, {"history_len": 0}, "skip reading"])
@pytest.mark.parametrize("second", [{}, {"write": False}, "skip reading"])
def test_two_requests_of_a_user_that_do_not_fit_together_both_end(
    first: Any, second: Any, async_scheduling: bool, patched_vllm: pytest.MonkeyPatch
) -> None:
    """What a preempted one leaves in the table must not keep the other from its blocks."""
    from tests.support.oracle import OracleEngine, expected_output

    engine = OracleEngine(18, async_scheduling, long_prefill_threshold=5)
    prompts = {}
    for shift, how in enumerate((first, second)):
        prompt = [(i + shift) % 5 for i in range(45)]
        params = {"user_id": "a", "history_len": 44, **(how if isinstance(how, dict) else {})}
        prompts[engine.add(prompt, 1, params, skip_reading=how == "skip reading")] = prompt
    engine.drain()
    assert all(engine.outputs[name] == expected_output(prompt, 1) for name, prompt in prompts.items())


def test_free_blocks_are_kept_and_usage_counts_idle_users_as_free(patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    patched_vllm.setenv("VLLM_USER_KV_LRU_MIN_FREE_BLOCKS", "10")
    engine = OracleEngine(21, async_scheduling=False)
    manager = engine.scheduler.kv_cache_manager
    for user in "abcd":
        ask(engine, [ord(user) % 5, *HISTORY], [1], user=user)
    assert engine.users.table.num_blocks == 10
    assert manager.usage == 0.0
    engine.add(HISTORY, 1, {"user_id": "x"})
    engine.step()
    assert manager.block_pool.get_num_free_blocks() >= 10


def test_single_flight_computes_a_cold_history_once(patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    engine = OracleEngine(40, async_scheduling=True)
    history = [i % 5 for i in range(40)]
    first, *others = (engine.add([*history, c], 1, {"user_id": "a", "history_len": 40}) for c in (1, 2, 3))
    engine.drain()
    assert engine.cached[first] == 0
    assert [engine.cached[other] for other in others] == [40, 40]


def test_single_flight_gives_up_when_it_takes_too_long(patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    patched_vllm.setenv("USERKV_SINGLE_FLIGHT_MAX_WAIT_MS", "0")
    engine = OracleEngine(40, async_scheduling=True)
    history = [i % 5 for i in range(40)]
    both = [engine.add([*history, c], 1, {"user_id": "a", "history_len": 40}) for c in (1, 2)]
    engine.drain()
    assert [engine.cached[one] for one in both] == [0, 0]


def test_history_is_visible_only_after_the_step_that_computed_it(patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    patched_vllm.setenv("USERKV_SINGLE_FLIGHT_MAX_WAIT_MS", "0")
    engine = OracleEngine(40, async_scheduling=True)
    engine.add([*HISTORY, 1], 4, {"user_id": "a", "history_len": 10})
    engine.step()
    # The first step is scheduled and its result is not in yet.
    assert len(engine.users.table) == 0
    early = engine.add([*HISTORY, 2], 1, {"user_id": "a", "history_len": 10})
    engine.step()
    assert engine.cached[early] == 0
    engine.step()
    assert len(engine.users.table) == 1
    engine.drain()
