"""Engines with a pool, for tests, and what they need to see users leave HBM and come back."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.engine import Answer, Ask, Engine, metric, random_tokens, start_engine

BLOCKS = 24
"""KV blocks of 128 tokens: HBM for two of the users below, and some."""

BLOCK_BYTES = 128 * 4096


def pool_engine(options: dict[str, Any], **engine: Any) -> AbstractContextManager[Engine]:
    """An engine with the connector; ``options`` are the connector's."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="MooncakeUserStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=options,
    )
    return start_engine(max_model_len=2048, num_gpu_blocks_override=BLOCKS, kv_transfer_config=config, **engine)


def wait_for(done: Callable[[], bool], engine: Engine) -> None:
    """Wait until figures that travel with the engine's steps say so."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)
        engine.ask(Ask([1, 2, 3], [4]))


def saved() -> float:
    """How many saves were committed."""
    return metric("userkv_pool_saves_total", result="committed")


def save_and_leave_hbm(engine: Engine, asks: list[Ask]) -> None:
    """Compute histories and wait until they are saved; other users push them out of HBM."""
    before = saved()
    for ask in asks:
        engine.ask(ask)
    wait_for(lambda: saved() >= before + len(asks), engine)
    for _ in range(2):
        engine.ask(Ask(random_tokens(random.Random(), 1400), [20], f"filler-{time.monotonic_ns()}"))
    wait_for(lambda: saved() >= before + len(asks) + 2, engine)


def assert_same(engine: Engine, asks: list[Ask]) -> list[Answer]:
    """Ask, and compare with what the engine computes without any cache."""
    answers = engine.ask(*asks)
    for answer, expected in zip(answers, engine.ask_without_cache(*asks), strict=True):
        assert answer.equals(expected), f"{answer.cached} tokens came from the cache"
    return answers


def history_of(user: str, length: int) -> list[int]:
    """A user's history, always the same."""
    return random_tokens(random.Random(user), length)
