"""``userkv rank`` against the real endpoint with a made-up engine."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranking import TABLE, FakeEngine, make_app, serving
from userkv.cli import main


class Server:
    def __init__(self, url: str, engine: FakeEngine) -> None:
        self.url = url
        self.engine = engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    app, engine = make_app(TABLE, tmp_path_factory.mktemp("model"))
    with serving(app) as url:
        yield Server(url, engine)


def lines(*requests: Any) -> str:
    return "".join(f"{request if isinstance(request, str) else json.dumps(request)}\n" for request in requests)


FIRST = {"user_id": "u1", "history": [100, 101], "candidates": [110, [17, 18]]}
SECOND = {"user_id": "u2", "history": [102], "candidates": [111, 112, 113], "top_k": 2}


def test_a_file_as_json_lines(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(lines(FIRST, "", SECOND))
    assert main(["rank", str(file), "--server", server.url, "--top-k", "1", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [score["item"] for score in first["scores"]] == [110, [17, 18]]
    assert (len(first["ranking"]), len(second["ranking"])) == (1, 2)  # The line's own top_k wins.


def test_standard_input(server: Server) -> None:
    command = [sys.executable, "-m", "userkv.cli", "rank", "-", "--server", server.url, "--json"]
    done = subprocess.run(command, input=lines(FIRST, "{"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(json.loads(done.stdout)["scores"]) == 2
    assert done.stderr.startswith("userkv: standard input, line 2: the request is no JSON")


def test_a_single_request_as_a_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.tiers = {"hbm": 1, "dram": 0, "ssd": 1}
    options = ["--user", "u", "--history", "100, 101", "--candidates", "[110, 111, [18, 19]]", "--top-k", "2"]
    assert main(["rank", "--server", server.url, "--model", "ranker", *options]) == 0
    server.engine.tiers = None
    head, *table = capsys.readouterr().out.splitlines()
    assert head.startswith("u: history of 2 tokens, 2 from the cache (1 hbm, 1 ssd); ")
    assert table[0].split() == ["rank", "item", "score", "click", "like"]
    rows = [row.split() for row in table[1:]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert float(rows[0][2]) >= float(rows[1][2])
    assert {row[1] for row in rows} <= {"110", "111", "[18,19]"}


def test_prefill(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", "--server", server.url, "--user", "u", "--history", "100", "--prefill"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert server.engine.calls[-1][0] == [16]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: the request is no JSON"),
        ("[]", "line 2: the request must be a JSON object"),
        ({**FIRST, "candidate": [1]}, "line 2: there is no field 'candidate'; did you mean 'candidates'?"),
        ({**FIRST, "history": ["x"]}, "line 2: history[0] must be a whole number or a list of tokens, not a string"),
        ({**FIRST, "history": [5]}, "line 2: item 5 is not in the model's catalogue"),
        ({**FIRST, "candidates": []}, "line 2: candidates is empty"),
        ({**FIRST, "model": "other"}, "line 2: there is no model 'other'"),
    ],
)
def test_a_bad_line_is_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: Any, says: str
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(lines(FIRST, line, SECOND))
    assert main(["rank", str(file), "--server", server.url, "--json"]) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1  # The lines before it are answered.
    assert printed.err.startswith(f"userkv: {file}, {says}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "there is nothing to rank; name a FILE"),
        (["file", "--user", "u"], "--user is for a single request"),
        (["file", "--prefill"], "--prefill is for a single request"),
        (["--user", "u"], "--user needs --history"),
        (["--user", "u", "--history", "1,x"], "--history must be items like 17,4,256, not '1,x'"),
        (["--user", "u", "--history", "1", "--candidates", "[1"], "--candidates must be items"),
        (["--user", "u", "--history", "1.5"], "history[0] must be a whole number or a list of tokens, not a fraction"),
        (["--user", "", "--history", "100", "--candidates", "100"], "user_id must have 1 to 256 bytes"),
        (["file", "--top-k", "0"], "--top-k must be at least 1, not 0"),
        (["no/such/file"], "no/such/file cannot be read (No such file or directory)"),
        (["file", "--timeout", "0"], "timeout_s must be more than 0"),
    ],
)
def test_options_that_cannot_be_used(
    server: Server, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert main(["rank", "--server", server.url, *options]) == 2
    assert f"userkv: {says}" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["rank", "--server", url, "--user", "u", "--history", "1", "--candidates", "1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_the_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    app, _ = make_app(TABLE, tmp_path)
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    file = tmp_path / "requests.jsonl"
    file.write_text(lines(FIRST))
    with serving(app) as url:
        assert main(["rank", str(file), "--server", url]) == 2
        assert "userkv: the server refuses the API key (HTTP 401)" in capsys.readouterr().err
        monkeypatch.setenv("USERKV_API_KEY", "secret")
        assert main(["rank", str(file), "--server", url]) == 0
        assert main(["rank", str(file), "--server", url, "--api-key", "wrong"]) == 2
