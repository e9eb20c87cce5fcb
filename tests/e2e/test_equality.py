"""Answers with the user cache equal answers without any, on real vLLM with a model that notices each token."""

import random
from collections.abc import Iterator

import pytest

from tests.support.engine import Answer, Ask, Engine, metric, random_tokens, sampling_params, start_engine

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 40
BLOCK_SIZE = 32


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A cache for 1,280 tokens and prompts in pieces of 256: users are evicted, requests preempted."""
    with start_engine(
        num_gpu_blocks_override=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=6,
        async_scheduling=request.param,
    ) as engine:
        yield engine


def check(engine: Engine, *asks: Ask) -> list[Answer]:
    answers = engine.ask(*asks)
    for ask, answer, expected in zip(asks, answers, engine.ask_without_cache(*asks), strict=True):
        assert expected.cached == 0
        assert answer.equals(expected), f"{ask.user} with {len(ask.history)} tokens of history, {answer.cached} cached"
    return answers


def change(history: list[int], rng: random.Random) -> list[int]:
    """What the next request of a user may look like."""
    where = rng.randrange(1, max(len(history), 2))
    kind = rng.choice(["same", "grow", "grow", "shrink", "edit", "slide"])
    if kind == "grow":
        return (history + random_tokens(rng, rng.randrange(1, 60)))[:600]
    if kind == "shrink":
        return history[:where]
    if kind == "edit":
        return [*history[:where], *random_tokens(rng, 1), *history[where + 1 :]]
    if kind == "slide":
        return history[where:] + random_tokens(rng, 2)
    return history


def test_randomised_traffic_under_pressure(engine: Engine) -> None:
    """Histories grow, shrink, are edited and slide, several requests of a user at once, beside ordinary traffic."""
    rng = random.Random(1)
    histories = {f"user {i}": random_tokens(rng, rng.randrange(100, 400)) for i in range(6)}
    shared_prefix = random_tokens(rng, 70)
    before = {name: metric(name) for name in ("userkv_user_hits_total", "userkv_evicted_blocks_total")}
    for _ in range(10):
        asks = []
        for _ in range(6):
            user = rng.choice(list(histories))
            histories[user] = change(histories[user], rng)
            candidates = random_tokens(rng, rng.randrange(1, 80))
            asks.append(Ask(histories[user], candidates, user, max_tokens=rng.choice([1, 1, 4, 20])))
        asks.append(Ask(shared_prefix, random_tokens(rng, 9)))
        check(engine, *asks)
    assert all(metric(name) > value for name, value in before.items())


def test_preempted_requests(engine: Engine) -> None:
    """Six requests with outputs that do not fit beside each other."""
    rng = random.Random(2)
    preempted = metric("vllm:num_preemptions_total")
    asks = [Ask(random_tokens(rng, 150), random_tokens(rng, 10), f"long {i}", max_tokens=150) for i in range(6)]
    check(engine, *asks)
    assert metric("vllm:num_preemptions_total") > preempted


def test_hits_are_exact_to_the_token(engine: Engine) -> None:
    rng = random.Random(7)
    history = random_tokens(rng, 301)
    for length in (301, 302, 333, 320, 319):
        history = (history + random_tokens(rng, 40))[:length] if length > len(history) else history[:length]
        check(engine, Ask(history, random_tokens(rng, 20), "exact"))
        (again,) = check(engine, Ask(history, random_tokens(rng, 20), "exact"))
        assert again.cached == length
    (no_candidates,) = check(engine, Ask(history, [], "exact"))
    assert no_candidates.cached == 318


def test_a_cold_user_is_computed_once_for_all_his_requests(engine: Engine) -> None:
    rng = random.Random(8)
    history = random_tokens(rng, 500)
    waits = metric("userkv_single_flight_waits_total")
    answers = check(engine, *(Ask(history, random_tokens(rng, 10), "crowd") for _ in range(4)))
    assert sorted(answer.cached for answer in answers) == [0, 500, 500, 500]
    assert metric("userkv_single_flight_waits_total") == waits + 3


def test_several_answers_to_one_prompt(engine: Engine) -> None:
    rng = random.Random(9)
    ask = Ask(random_tokens(rng, 200), random_tokens(rng, 10), "several", max_tokens=5, n=3)
    answers = engine.ask(ask)
    (expected, *_) = engine.ask_without_cache(ask)
    assert len(answers) == 3
    assert all(answer.equals(expected) for answer in answers)


def test_output_after_the_candidates_never_enters_the_cache(engine: Engine) -> None:
    rng = random.Random(10)
    history, candidates = random_tokens(rng, 90), random_tokens(rng, 60)
    (first,) = check(engine, Ask(history, candidates, "output", max_tokens=50))
    (second,) = check(engine, Ask([*history, *candidates, *first.tokens], [5], "output"))
    assert second.cached == 90


def test_users_do_not_share_even_equal_histories(engine: Engine) -> None:
    rng = random.Random(11)
    history = random_tokens(rng, 100)
    engine.ask(Ask(history, [5], "left"))
    (right, ordinary) = check(engine, Ask(history, [5], "right"), Ask(history, [5]))
    assert (right.cached, ordinary.cached) == (0, 0)


def test_an_aborted_request_keeps_what_was_computed(engine: Engine) -> None:
    rng = random.Random(12)
    ask = Ask(random_tokens(rng, 500), [5], "aborted")
    llm_engine = engine.llm.llm_engine
    misses = metric("userkv_user_misses_total")
    llm_engine.add_request("gone", {"prompt_token_ids": ask.prompt}, sampling_params(ask))
    while metric("userkv_user_misses_total") == misses:
        llm_engine.step()
    llm_engine.abort_request(["gone"])
    (answer,) = check(engine, ask)
    assert 256 <= answer.cached <= 500
    assert check(engine, ask)[0].cached == 500


def test_reset_prefix_cache_forgets_users(engine: Engine) -> None:
    rng = random.Random(13)
    ask = Ask(random_tokens(rng, 100), [5], "reset")
    check(engine, ask)
    assert engine.llm.reset_prefix_cache()
    assert check(engine, ask)[0].cached == 0
    assert check(engine, ask)[0].cached == 100


def test_bad_parameters_raise_before_any_compute(engine: Engine) -> None:
    computed = metric("vllm:prompt_tokens_total")
    with pytest.raises(ValueError, match="user_id must have 1 to 256 bytes of UTF-8, not 300"):
        engine.ask(Ask([5, 6, 7], [8], "x" * 300))
    assert metric("vllm:prompt_tokens_total") == computed
