"""A ranker is trained on MovieLens and served; its quality is the same with and without the cache, and real."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import ratings
from tests.support.ranking_engine import RankAsk, RankingEngine, start_ranking_engine
from userkv.ranking.spec import load_spec
from userkv.train.evaluate import Case, Metrics, evaluate, leave_out, popularity
from userkv.train.export import load_ranker
from userkv.train.interactions import Interactions, read_interactions
from userkv.train.scorer import ModelScorer

pytestmark = pytest.mark.e2e

USERS = 150
NEGATIVES = 100


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MovieLens where it is at hand, else a generated log of the same form."""
    data = Path(os.environ.get("USERKV_DATA") or Path(__file__).parents[3] / "shared" / "data")
    path = data / "movielens-latest-small" / "ratings.csv"
    return path if path.is_file() else ratings(tmp_path_factory.mktemp("log") / "ratings.csv", users=300, events=30)


@pytest.fixture(scope="module")
def report(log: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `userkv train` reports of a short training; the model is in ``report["directory"]``."""
    directory = tmp_path_factory.mktemp("trained") / "model"
    command = [sys.executable, "-m", "userkv.cli", "train", "--data", str(log), "--output", str(directory)]
    done = subprocess.run([*command, "--epochs", "2", "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report | {"directory": directory}


@pytest.fixture(scope="module")
def engine(report: dict[str, Any]) -> Iterator[RankingEngine]:
    """HBM for about a tenth of the users."""
    with start_ranking_engine(
        report["directory"],
        num_gpu_blocks_override=40,
        block_size=32,
        max_model_len=1024,
        max_num_batched_tokens=512,
        kv_transfer_config={
            "kv_connector": "MooncakeUserStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"backend": "local", "local_dram_bytes": 2**28},
        },
    ) as engine:
        yield engine


def served(engine: RankingEngine, cases: list[Case], *, users: bool) -> tuple[Metrics, dict[str, int]]:
    """The evaluation through the engine, and where histories came from."""
    scores, tiers = {}, {"hbm": 0, "dram": 0}
    weights = engine.spec.task_weights
    for first in range(0, len(cases), 4):
        some = cases[first : first + 4]
        asks = [RankAsk(case.history, case.candidates, case.user if users else None) for case in some]
        for case, ranked in zip(some, engine.rank(*asks), strict=True):
            scores[tuple(case.history)] = (ranked.scores @ ranked.scores.new_tensor(weights)).numpy()
            for tier, tokens in ranked.tiers.items():
                tiers[tier] += tokens
    return evaluate(cases, lambda history, candidates: scores[tuple(history)]), tiers


def assert_equal(one: Metrics, other: Metrics) -> None:
    for name, value in one.as_json().items():
        assert value == pytest.approx(other.as_json()[name], abs=1e-3), name


def test_quality_beats_popularity(report: dict[str, Any]) -> None:
    test = report["test"]
    assert test["model"]["hr"] > 1.3 * test["popularity"]["hr"]
    assert test["model"]["ndcg"] > 1.3 * test["popularity"]["ndcg"]
    assert test["model"]["auc"] > test["popularity"]["auc"]


def test_quality_is_the_same_with_the_cache(log: Path, report: dict[str, Any], engine: RankingEngine) -> None:
    interactions: Interactions = read_interactions(log, "ratings")
    cases = list(leave_out(interactions, load_spec(report["directory"]).history_window, negatives=NEGATIVES))[:USERS]
    plain = ModelScorer(load_ranker(report["directory"]), interactions.catalogue, 16)
    expected = evaluate(cases, plain)
    assert expected.hr > evaluate(cases, popularity(interactions)).hr

    without, tiers = served(engine, cases, users=False)
    assert_equal(without, expected)
    assert sum(tiers.values()) == 0

    cold, _ = served(engine, cases, users=True)
    assert_equal(cold, expected)
    history = sum(len(case.history) for case in cases)
    from_pool, tiers = served(engine, cases, users=True)
    assert_equal(from_pool, expected)
    assert tiers["dram"] > 0.8 * history  # What was computed faster than it could be saved is missing.
    recent_first, tiers = served(engine, cases[::-1], users=True)
    assert_equal(recent_first, expected)
    assert tiers["hbm"] > 0
    assert sum(tiers.values()) > 0.8 * history
