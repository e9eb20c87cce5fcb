"""Ranking on real vLLM: scores equal those of models without any cache, whatever the cache and the batch look like."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.engine import metric
from tests.support.ranking_engine import (
    RankAsk,
    RankingEngine,
    hstu_scores,
    qwen3_score_of_one,
    qwen3_scores,
    start_ranking_engine,
    write_hstu,
)
from userkv.serving.demo_model import ensure_demo_ranker

pytestmark = pytest.mark.e2e

TOLERANCES = {"hstu": 1e-5, "qwen3": 1e-4}
BLOCK_SIZE = 32


class Subject:
    """An engine, and what it must return."""

    def __init__(
        self, engine: RankingEngine, expected: Callable[[RankAsk], torch.Tensor], tolerance: float, items: int
    ) -> None:
        self.engine = engine
        self.tolerance = tolerance
        self.from_pool = 0
        self._expected = expected
        self._items = items

    def check(self, *asks: RankAsk) -> list[int]:
        """Rank them at once; returns the cached tokens of each. What came from the pool: ``from_pool``."""
        ranked = self.engine.rank(*asks)
        for ask, result in zip(asks, ranked, strict=True):
            assert result.scores.shape == (len(ask.candidates), len(self.engine.spec.tasks))
            torch.testing.assert_close(
                result.scores,
                self._expected(ask),
                atol=self.tolerance,
                rtol=0,
                msg=lambda text, ask=ask: f"{ask}: {text}",
            )
            assert sum(result.tiers.values()) == (result.cached if ask.user is not None else 0)
        self.from_pool = sum(result.tiers.get("dram", 0) for result in ranked)
        return [result.cached for result in ranked]

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Some items."""
        return [rng.randrange(self._items) for _ in range(count)]


@pytest.fixture(scope="module", params=["hstu", "qwen3"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A cache of 1,280 tokens, steps of 128, and a pool: candidates are split, users evicted, requests preempted."""
    if request.param == "hstu":
        model = write_hstu(tmp_path_factory.mktemp("hstu"), max_sequence_length=500)
        expected: Callable[[Path, RankAsk], torch.Tensor] = hstu_scores
    else:
        model, expected = ensure_demo_ranker(), qwen3_scores
    with start_ranking_engine(
        model,
        num_gpu_blocks_override=40,
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        max_num_batched_tokens=128,
        max_num_seqs=6,
        # Requests take turns, and are let in although not all of them will fit: so they preempt each other.
        long_prefill_token_threshold=40,
        scheduler_reserve_full_isl=False,
        kv_transfer_config={
            "kv_connector": "MooncakeUserStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"backend": "local", "local_dram_bytes": 2**27},
        },
    ) as engine:
        items = 250**2 if request.param == "hstu" else 2168**2
        yield Subject(engine, lambda ask: expected(model, ask), TOLERANCES[request.param], items)


def test_cold_then_from_the_cache(subject: Subject) -> None:
    rng = random.Random(1)
    history = subject.draw(rng, 150)
    for expected_hit in (0, 300, 300):
        assert subject.check(RankAsk(history, subject.draw(rng, 20), "cold")) == [expected_hit]
    grown = history + subject.draw(rng, 7)
    assert subject.check(RankAsk(grown, subject.draw(rng, 5), "cold")) == [300]
    assert subject.check(RankAsk(grown, subject.draw(rng, 1), "cold")) == [314]


def test_repeating_the_same_request_has_all_scores(subject: Subject) -> None:
    """Under vLLM's own prefix cache a repeated request hits blocks with candidates, and those have no scores."""
    rng = random.Random(2)
    for user in ("same", None):
        ask = RankAsk(subject.draw(rng, 70), subject.draw(rng, 40), user)
        for _ in range(3):
            subject.check(ask)


def test_prefill_and_then_rank(subject: Subject) -> None:
    rng = random.Random(3)
    history = subject.draw(rng, 60)
    assert subject.check(RankAsk(history, [], "early", stage="prefill")) == [0]
    assert subject.check(RankAsk(history, subject.draw(rng, 9), "early")) == [120]


def test_without_any_history(subject: Subject) -> None:
    rng = random.Random(4)
    assert subject.check(RankAsk([], subject.draw(rng, 30), "new")) == [0]


def test_one_run_per_candidate_is_what_isolation_means() -> None:
    model, rng = ensure_demo_ranker(), random.Random(8)
    ask = RankAsk([rng.randrange(2168**2) for _ in range(40)], [rng.randrange(2168**2) for _ in range(4)])
    ones = torch.tensor([[qwen3_score_of_one(model, ask.history, candidate)] for candidate in ask.candidates])
    torch.testing.assert_close(qwen3_scores(model, ask), ones, atol=1e-5, rtol=0)


def test_from_the_pool(subject: Subject) -> None:
    """A user that has left HBM is loaded, in whole or behind what HBM still has of it."""
    rng = random.Random(9)
    history = subject.draw(rng, 150)
    before = metric("userkv_pool_saves_total", result="committed")
    for number in range(4):  # The user, and three more that push it out.
        subject.check(RankAsk(subject.draw(rng, 190) if number else history, subject.draw(rng, 3), f"pool {number}"))
        deadline = time.monotonic() + 30
        while metric("userkv_pool_saves_total", result="committed") <= before + number:
            assert time.monotonic() < deadline
            subject.check(RankAsk([], subject.draw(rng, 1)))  # Figures and commits travel with steps.
    assert subject.check(RankAsk(history + subject.draw(rng, 10), subject.draw(rng, 33), "pool 0")) == [300]
    assert subject.from_pool == 300
    assert subject.check(RankAsk(history, subject.draw(rng, 8), "pool 0")) == [300]
    assert subject.from_pool == 0


def test_order_and_company_do_not_matter(subject: Subject) -> None:
    rng = random.Random(5)
    history, candidates = subject.draw(rng, 40), subject.draw(rng, 25)
    (whole,) = subject.engine.rank(RankAsk(history, candidates, "u"))
    order = rng.sample(range(25), 25)
    shuffled, alone = subject.engine.rank(
        RankAsk(history, [candidates[i] for i in order], "u"), RankAsk(history, candidates[7:8], "u")
    )
    torch.testing.assert_close(shuffled.scores, whole.scores[order], atol=subject.tolerance, rtol=0)
    torch.testing.assert_close(alone.scores, whole.scores[7:8], atol=subject.tolerance, rtol=0)


def test_candidates_differ(subject: Subject) -> None:
    """Or the tests here could not fail: neither by candidate nor by history."""
    rng = random.Random(6)
    candidates = subject.draw(rng, 30)
    first, second = subject.engine.rank(
        RankAsk(subject.draw(rng, 40), candidates, "a"), RankAsk(subject.draw(rng, 40), candidates, "b")
    )
    assert first.scores.std(0).min() > 100 * subject.tolerance
    assert (first.scores - second.scores).abs().mean() > 100 * subject.tolerance


def test_randomised_traffic_under_pressure(subject: Subject) -> None:
    """Batches of mixed sizes, several requests per user, evictions, with and without users."""
    rng = random.Random(7)
    histories = {f"user {i}": subject.draw(rng, rng.randrange(1, 180)) for i in range(5)}
    hits = 0
    for _ in range(12):
        asks = []
        for _ in range(rng.randrange(1, 9)):
            user = rng.choice([*histories, None])
            history = histories[user] if user is not None else subject.draw(rng, rng.randrange(0, 30))
            if user is not None and rng.random() < 0.5:
                histories[user] = history = (history + subject.draw(rng, rng.randrange(1, 10)))[:200]
            asks.append(RankAsk(history, subject.draw(rng, rng.choice([1, 2, 10, 60, 150])), user))
        hits += sum(cached > 0 for cached in subject.check(*asks))
    assert hits > 5


def test_preempted_requests(subject: Subject) -> None:
    """They begin again, from what HBM still has, with all their scores."""
    rng = random.Random(10)
    preempted = metric("vllm:num_preemptions_total")
    for _ in range(3):
        subject.check(
            *(RankAsk(subject.draw(rng, 150), subject.draw(rng, 120), user) for user in ("p1", "p2", None, "p3", None))
        )
    assert metric("vllm:num_preemptions_total") > preempted


def test_prompts_that_no_worker_could_compute_are_refused(subject: Subject) -> None:
    """By whatever way they come; the engine goes on."""
    from vllm import PoolingParams

    def refused(token_ids: list[int], says: str, history_len: int | None = None) -> None:
        user = {"kv_transfer_params": {"user_id": "u", "history_len": history_len}}
        params = PoolingParams(extra_kwargs=user if history_len is not None else None)
        prompt = {"prompt_token_ids": token_ids}
        with pytest.raises(ValueError, match=says):
            subject.engine.llm.encode(prompt, pooling_params=params, pooling_task="classify", use_tqdm=False)

    prompt = subject.engine.spec.prompt([1, 2], [3, 4])
    for wrong in (prompt.history_len - 1, prompt.history_len + 1):
        refused(prompt.token_ids, "the first candidate begins at token 4; send history_len=4", wrong)
    assert subject.engine.spec.format is not None
    start = subject.engine.spec.format.candidate([16])
    if len(start) == 2:  # A marker.
        refused([20, start[0]], "a candidate at token 1 has no item's tokens")
        refused([20, start[0], *[20] * 900], "at token 1 has 900 tokens; the model takes 2")
    else:
        refused([20] * 600, "the history has 600 tokens and the model takes 500")
        refused([20, *start, 17, 18], "at token 1 has 3 tokens; the model takes 2")
    refused([20, 10**6], "tokens that are not from 0 to|out of vocabulary")
    subject.check(RankAsk([1, 2], [3, 4], "u"))
