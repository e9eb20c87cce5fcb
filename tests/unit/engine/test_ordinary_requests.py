"""Requests without a user are scheduled exactly as by stock vLLM: same steps, same blocks, same tokens."""

import random
from typing import Any

import pytest

from tests.support.patching import put_users_into_vllm


def trace(seed: int, async_scheduling: bool, users: bool) -> list[Any]:
    """What vLLM decides in each step of a random run of ordinary requests."""
    from tests.support.oracle import OracleEngine

    steps: list[Any] = []

    class Recorder(OracleEngine):
        def _compute(self, output: Any) -> Any:
            new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in output.scheduled_new_reqs]
            old = output.scheduled_cached_reqs
            steps.append((output.num_scheduled_tokens, new, old.req_ids, old.new_block_ids, old.num_computed_tokens))
            return super()._compute(output)

        def check(self) -> None:
            """Stock vLLM has no users to check."""

    rng = random.Random(seed)
    engine = Recorder(rng.randrange(17, 30), async_scheduling)
    assert type(engine.scheduler).__name__.endswith("ForGR") == users
    for _ in range(60):
        action = rng.random()
        if action < 0.4:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 5))] * rng.randrange(1, 11)
            engine.add(prompt, rng.randrange(1, 9))
        elif action < 0.45 and engine.requests:
            engine.abort(rng.choice(list(engine.requests)))
        elif action < 0.47:
            engine.reset(running_too=rng.random() < 0.5)
        else:
            engine.step()
    engine.drain()
    return [*steps, engine.outputs]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_same_as_stock_vllm(async_scheduling: bool) -> None:
    for seed in range(40):
        stock = trace(seed, async_scheduling, users=False)
        with pytest.MonkeyPatch.context() as monkeypatch:
            put_users_into_vllm(monkeypatch)
            assert trace(seed, async_scheduling, users=True) == stock
