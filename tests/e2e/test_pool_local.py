"""The embedded pool behind real engines: same answers, whatever HBM and pool hold."""

import random
from collections.abc import Iterator

import pytest

from tests.support.engine import Ask, Engine, metric, random_tokens
from tests.support.pool_engine import (
    BLOCK_BYTES,
    assert_same,
    pool_engine,
    save_and_leave_hbm,
    saved,
    wait_for,
)

pytestmark = pytest.mark.e2e


WAYS = {
    "async": {},
    "sync": {"load_async": False},
    "layerwise": {"use_layerwise": True},
    "layerwise, compiled": {"use_layerwise": True},
}


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    local = {"local_dir": str(tmp_path_factory.mktemp("pool")), "local_dram_bytes": "64MiB"}
    # Compiled, the model is cut at its attention, and only what stands there calls the connector between layers.
    with pool_engine({**local, **WAYS[request.param]}, enforce_eager="compiled" not in request.param) as started:
        yield started


def test_histories_that_left_hbm_come_back_from_the_pool(engine: Engine) -> None:
    rng = random.Random(1)
    histories = {f"known-{i}": random_tokens(rng, 700 + 61 * i) for i in range(5)}
    asks = [Ask(history, random_tokens(rng, 20), user) for user, history in histories.items()]
    save_and_leave_hbm(engine, asks)
    loads, tokens = metric("userkv_swapin_successes_total"), metric("userkv_swapin_tokens_total")
    again = [Ask(history, random_tokens(rng, 20), user) for user, history in histories.items()]
    answers = [answer for ask in again for answer in assert_same(engine, [ask])]
    assert [answer.cached for answer in answers] == [len(history) for history in histories.values()]
    wait_for(lambda: metric("userkv_swapin_successes_total") == loads + 5, engine)
    assert metric("userkv_swapin_tokens_total") == tokens + sum(map(len, histories.values()))
    # After a swap-in the user is in HBM like any other.
    hits = metric("userkv_user_hits_total")
    assert assert_same(engine, [again[-1]])[0].cached == len(again[-1].history)
    assert metric("userkv_user_hits_total") == hits + 1


def test_histories_that_change_use_what_is_common(engine: Engine) -> None:
    rng = random.Random(2)
    history = random_tokens(rng, 700)
    changed = [*history[:500], *random_tokens(rng, 200)]
    variants = {
        "grown": ([*history, *random_tokens(rng, 77)], 700),
        "shrunk": (history[:333], 333),
        "edited": (changed, 500),
        "slid": (history[1:], 0),
    }
    save_and_leave_hbm(engine, [Ask(history, [20], user) for user in variants])
    for user, (variant, common) in variants.items():
        (answer,) = assert_same(engine, [Ask(variant, random_tokens(rng, 10), user)])
        # No first token is equal, unless the history slid by luck onto equal tokens.
        assert answer.cached == common, user


def test_an_append_writes_the_last_block_only_and_reranking_nothing(engine: Engine) -> None:
    rng = random.Random(3)
    history = random_tokens(rng, 1000)
    before = saved()
    engine.ask(Ask(history, [20], "appender"))
    wait_for(lambda: saved() == before + 1, engine)
    written = metric("userkv_pool_save_bytes_sum")
    engine.ask(*(Ask(history, random_tokens(rng, 9), "appender") for _ in range(3)))
    engine.ask(Ask([5, 6], [7]))
    assert metric("userkv_pool_save_bytes_sum") == written
    commits = saved()
    engine.ask(Ask([*history, *random_tokens(rng, 20)], [20], "appender"))
    wait_for(lambda: saved() == commits + 1, engine)
    assert metric("userkv_pool_save_bytes_sum") - written == BLOCK_BYTES


def test_bursts_and_mixed_traffic(engine: Engine) -> None:
    rng = random.Random(4)
    histories = {f"burst-{i}": random_tokens(rng, 300 + 97 * i) for i in range(6)}
    for _ in range(3):
        asks = [Ask(history, random_tokens(rng, 12), user) for user, history in histories.items() for _ in range(2)]
        asks += [Ask(random_tokens(rng, 200), [], None) for _ in range(3)]
        rng.shuffle(asks)
        assert_same(engine, asks)
        for user, history in histories.items():
            histories[user] = [*history, *random_tokens(rng, rng.randrange(40))]


def test_new_weights_hide_what_the_pool_has(engine: Engine) -> None:
    rng = random.Random(5)
    ask = Ask(random_tokens(rng, 500), [20], "weights")
    save_and_leave_hbm(engine, [ask])
    engine.llm.reset_prefix_cache()
    assert engine.ask(ask)[0].cached == 0
    save_and_leave_hbm(engine, [])
    assert engine.ask(ask)[0].cached == 500
    engine.llm.llm_engine.set_weight_version("v2")
    assert engine.ask(ask)[0].cached == 0
    save_and_leave_hbm(engine, [])
    engine.llm.llm_engine.set_weight_version("v3")
    assert engine.ask(ask)[0].cached == 0
    engine.llm.llm_engine.set_weight_version("v2")
    assert engine.ask(ask)[0].cached == 500
