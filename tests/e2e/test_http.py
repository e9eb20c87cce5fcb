"""The user cache over HTTP: what a client gets, what is refused, what an operator sees."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

HISTORY = list(range(100, 300))


class Client:
    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, prompt: list[int], user: Any = None, **body: Any) -> tuple[int, str]:
        fields = {"model": "userkv-demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
        if user is not None:
            fields["kv_transfer_params"] = user
        return self.post("/v1/completions", fields)

    def cached(self, prompt: list[int], user: Any = None) -> int:
        """Run a request; how many prompt tokens came from the cache."""
        status, text = self.complete(prompt, user)
        assert status == 200, text
        details = json.loads(text)["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        found = (re.match(r"(\w+)\{.*\} (\S+)$", line) for line in lines if line.startswith("userkv_"))
        return {match[1]: float(match[2]) for match in found if match}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    pool = str(tmp_path_factory.mktemp("pool"))  # Not the one that knows the users of the last run.
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "userkv.cli",
            "serve",
            "--model",
            "userkv-demo",
            "--port",
            "0",
            "--block-size",
            "32",
            "--num-gpu-blocks-override",
            "600",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "USERKV_POOL_DIR": pool},
    )
    try:
        assert server.stdout is not None
        url = next(match[0] for line in server.stdout if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        yield Client(url)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def test_a_returning_user_hits_his_whole_history(client: Client) -> None:
    user = {"user_id": "returning", "history_len": 200}
    assert client.cached([*HISTORY, 7, 8, 9], user) == 0
    assert client.cached([*HISTORY, 10, 11], user) == 200
    assert client.cached([*HISTORY, 12, 13, 14, 15], {"user_id": "returning", "history_len": 202}) == 200
    assert client.cached([*HISTORY, 12, 13, 20], {"user_id": "returning", "history_len": 203}) == 202


def test_ordinary_requests_are_as_in_stock_vllm(client: Client) -> None:
    prompt = list(range(1000, 1100))
    assert client.cached(prompt) == 0
    assert client.cached(prompt) == 96


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("user", "says"),
    [
        ({"user_id": 5, "history_len": 3}, "user_id must be a string, not int"),
        ({"user_id": ""}, "1 to 256 bytes"),
        ({"user_id": "u" * 257}, "1 to 256 bytes"),
        ({"user_id": "u", "history_len": 201}, "between 0 and the prompt's 200 tokens, but it is 201"),
        ({"user_id": "u", "histroy_len": 5}, "did you mean 'history_len'"),
        ({"user_id": "u", "stage": "x"}, "stage must be one of"),
        ({"history_len": 5}, "without 'user_id'"),
    ],
)
def test_bad_parameters_are_http_400(client: Client, user: dict[str, Any], says: str, stream: bool) -> None:
    status, text = client.complete(HISTORY, user, stream=stream)
    assert status == 400
    assert says in json.loads(text)["error"]["message"]


def test_other_connectors_parameters_pass(client: Client) -> None:
    assert client.complete(HISTORY, {"do_remote_decode": False, "remote_engine_id": "x"})[0] == 200


def test_text_prompts_are_checked_too(client: Client) -> None:
    body = {"model": "userkv-demo", "prompt": "a1 b2 a3 b4", "max_tokens": 1}
    assert client.post("/v1/completions", {**body, "kv_transfer_params": {"user_id": "t", "history_len": 5}})[0] == 400
    assert client.post("/v1/completions", {**body, "kv_transfer_params": {"user_id": "t", "history_len": 4}})[0] == 200


def test_embeddings_cannot_name_a_user_and_the_server_lives_on(client: Client) -> None:
    status, _ = client.complete(HISTORY, {"user_id": "u"}, prompt_embeds="AAAA")
    assert status == 400
    assert client.complete(HISTORY)[0] == 200


def test_metrics_follow_the_requests(client: Client) -> None:
    before = client.metrics()
    user = {"user_id": "counted", "history_len": 64}
    for candidate in (1, 2, 3):
        client.cached([*HISTORY[:64], candidate], user)
    after = client.metrics()
    assert after["userkv_user_misses_total"] == before["userkv_user_misses_total"] + 1
    assert after["userkv_user_hits_total"] == before["userkv_user_hits_total"] + 2
    assert after["userkv_hit_tokens_total"] == before["userkv_hit_tokens_total"] + 128
    assert after["userkv_history_tokens_total"] == before["userkv_history_tokens_total"] + 192
    assert after["userkv_users"] == before["userkv_users"] + 1
    assert after["userkv_blocks"] == before["userkv_blocks"] + 2
    for name in ("lru_evictions", "evicted_blocks", "single_flight_waits", "single_flight_timeouts"):
        assert f"userkv_{name}_total" in after


def test_tenants_with_different_salts_share_nothing(client: Client) -> None:
    user = {"user_id": "salted", "history_len": 100}
    for salt, expected in (("one", 0), ("two", 0), ("one", 100), ("two", 100)):
        status, text = client.complete(HISTORY[:110], user, cache_salt=salt)
        assert status == 200
        assert (json.loads(text)["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) == expected


@pytest.mark.parametrize(
    ("log", "options"),
    [
        ("otto/train_sample.jsonl", ["--every", "10"]),
        ("movielens-latest-small/ratings.csv", ["--min-history", "20", "--max-requests", "60"]),
    ],
)
def test_real_logs_replay(client: Client, log: str, options: list[str], tmp_path: Path) -> None:
    path = Path(os.environ.get("USERKV_DATA", "../shared/data")) / log
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    command = [sys.executable, "-m", "userkv.cli", "replay", str(path), "--server", client.url, *options]
    ratios = []
    for i, users in enumerate(([], ["--no-users"])):
        report = tmp_path / f"{i}.json"
        subprocess.run([*command, *users, "--json", str(report)], check=True, timeout=300)
        figures = json.loads(report.read_text())
        assert figures["total"]["failed"] == 0
        ratios.append(figures["returning"]["history_hit_ratio"])
    assert ratios[0] > ratios[1]


def test_many_at_once(client: Client) -> None:
    """Users and ordinary requests together."""

    def one(i: int) -> int:
        user = {"user_id": f"many {i % 7}", "history_len": 150} if i % 3 else None
        return client.complete([*HISTORY[i % 5 : i % 5 + 150], i], user)[0]

    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(one, range(80))) == {200}
