"""`/v1/rank` on a real server with a ranking model, as its clients use it."""

import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.ranking_engine import RankAsk, hstu_scores, write_hstu
from tests.support.server import Server
from userkv.client import RankClient, RankRequestError, RankResult

pytestmark = pytest.mark.e2e

CAPACITY = 250**2
KEY = "secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hstu(tmp_path_factory.mktemp("models") / "hstu", max_sequence_length=512)


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ["--model", str(model), "--served-model-name", "ranker", "--dtype", "float32", "--api-key", KEY]
    server = Server(tmp_path_factory.mktemp("home"), *options, "--kv-cache-gib", "0.25", "--max-model-len", "1500")
    try:
        server.wait_for("curl ")
        address = next(line for line in server.lines if "serves ranker on" in line)
        yield address.split(" on ")[1].split()[0]
        assert server.interrupt() == 0
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[RankClient]:
    with RankClient(url, api_key=KEY) as client:
        yield client


def items(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(CAPACITY) for _ in range(count)]


def check(model: Path, result: RankResult, history: list[int], candidates: list[int]) -> None:
    """The answer is what the plain model says."""
    expected = hstu_scores(model, RankAsk(history, candidates)).double()
    tasks = torch.tensor([[score.tasks["click"], score.tasks["like"]] for score in result.scores if score.tasks])
    torch.testing.assert_close(tasks.double(), expected, atol=1e-5, rtol=0)
    totals = torch.tensor([score.score for score in result.scores]).double()
    torch.testing.assert_close(totals, expected @ torch.tensor([1.0, 0.5]).double(), atol=1e-5, rtol=0)
    assert [score.item for score in result.scores] == candidates
    best = sorted(range(len(candidates)), key=lambda i: -result.scores[i].score)
    assert list(result.ranking) == [candidates[i] for i in best]


def test_scores_cold_and_cached(client: RankClient, model: Path) -> None:
    rng = random.Random(1)
    history = items(rng, 200)
    for cached in (0, 400, 400):
        candidates = items(rng, 50)
        result = client.rank("alice", history, candidates)
        check(model, result, history, candidates)
        assert (result.usage.history_tokens, result.usage.candidate_tokens) == (400, 100)
        assert result.usage.cached_tokens.total == cached


def test_prefill_when_the_user_opens_the_app(client: RankClient, model: Path) -> None:
    rng = random.Random(2)
    history, candidates = items(rng, 100), items(rng, 10)
    assert client.prefill("opener", history).scores == ()
    result = client.rank("opener", history, candidates)
    assert result.usage.cached_tokens.hbm == 200
    check(model, result, history, candidates)


def test_many_clients_at_once(client: RankClient, model: Path) -> None:
    rng = random.Random(3)
    histories = {f"user-{i}": items(rng, rng.randrange(0, 250)) for i in range(6)}
    asks = [(user, histories[user], items(rng, rng.randrange(1, 60))) for user in rng.choices([*histories], k=40)]
    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda ask: client.rank(*ask), asks))
    for (_, history, candidates), result in zip(asks, results, strict=True):
        check(model, result, history, candidates)


@pytest.mark.parametrize(
    ("history", "candidates", "says"),
    [
        ([1], [], "candidates is empty"),
        ([CAPACITY + 10**6], [1], "does not fit"),
        ([[516]], [1], "reserved for the start of a candidate"),
        ([1] * 300, [1], "the history has 600 tokens and the model takes 512"),
        ([1], [1] * 800, "more than the 1500 that this server takes"),
    ],
)
def test_what_is_refused(client: RankClient, history: list[int], candidates: list[int], says: str) -> None:
    with pytest.raises(RankRequestError, match=says):
        client.rank("u", history, candidates)
    assert client.rank("u", [1], [2]).scores  # And the server goes on.


def test_the_key_is_asked_for(url: str) -> None:
    with RankClient(url) as client, pytest.raises(RankRequestError) as refused:
        client.rank("u", [1], [2])
    assert refused.value.status == 401


def test_documented_in_openapi(url: str) -> None:
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=60) as answer:
        paths = json.load(answer)["paths"]
    assert {"get", "post"} <= paths["/v1/rank"].keys()


def test_the_command_line(url: str) -> None:
    request = json.dumps({"user_id": "shell", "history": [1, 2, 3], "candidates": [4, 5, 6]})
    command = [sys.executable, "-m", "userkv.cli", "rank", "-", "--server", url, "--api-key", KEY, "--json"]
    done = subprocess.run(command, input=request + "\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert sorted(answer["ranking"]) == [4, 5, 6]
