"""``userkv replay`` against a server that ranks: the real endpoint with a made-up engine."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.fake_model_server import FakeModelServer
from tests.support.ranking import CODEC, TABLE, FakeEngine, make_app, serving
from userkv.cli import main
from userkv.client import RankInfo
from userkv.core.errors import InvalidSettingError
from userkv.ranking.item_codec import ItemCodec
from userkv.replay.rank_target import CATALOGUE, RankTarget, codec_of, find_ranking_model

LOG = "userId,movieId,rating,timestamp\n" + "".join(f"{n % 2 + 1},{n % 40 + 100},4.0,{n}\n" for n in range(40))


class Server:
    def __init__(self, url: str, engine: FakeEngine) -> None:
        self.url = url
        self.engine = engine


def with_models(app: FastAPI) -> FastAPI:
    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": "ranker"}]}

    return app


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("KV_MANAGER_FOR_GR", "1")
    app, engine = make_app(TABLE, tmp_path)
    with serving(with_models(app)) as url:
        yield Server(url, engine)


@pytest.fixture
def codec(tmp_path: Path) -> Iterator[Server]:
    app, engine = make_app(CODEC, tmp_path)
    with serving(with_models(app)) as url:
        yield Server(url, engine)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "ratings.csv"
    path.write_text(LOG)
    return path


def test_item_ids_of_a_catalogue(table: Server, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.engine.cached = 3
    assert main(["replay", str(log), "--server", table.url, "--every", "5", "--candidates", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["endpoint"] == "/v1/rank"
    total = report["total"]
    assert (total["requests"], total["failed"]) == (8, 0)
    # 20 events a user, a request every 5: histories of 5, 10, 15 and 20 items of one token, and three candidates.
    assert total["history_tokens"] == 2 * (5 + 10 + 15 + 20)
    assert total["prompt_tokens"] == total["history_tokens"] + 8 * 3
    assert total["cached_tokens"] == 8 * 3
    assert total["ttft_p50_s"] == total["latency_p50_s"] > 0
    histories = [tokens[:-3] for tokens, params, _ in table.engine.calls if _user(params) == "1"]
    assert max(histories, key=len) == [16 + n % 40 for n in range(0, 40, 2)]


def test_throw_away_requests_keep_nothing(table: Server, log: Path) -> None:
    assert main(["replay", str(log), "--server", table.url, "--every", "5", "--candidates", "3", "--json"]) == 0
    strangers = [tokens for tokens, params, _ in table.engine.calls if _user(params) not in ("1", "2")]
    assert strangers
    assert all(token >= 64 for tokens in strangers for token in tokens)  # Candidates only.


def _user(params: Any) -> Any:
    return params.extra_kwargs["kv_transfer_params"]["user_id"]


def test_the_servers_own_code(codec: Server, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--server", codec.url, "--every", "5", "--candidates", "3", "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert total["history_tokens"] == 2 * 2 * (5 + 10 + 15 + 20)
    assert total["prompt_tokens"] == total["history_tokens"] + 8 * 3 * 3  # A candidate has a marker, too.
    assert codec.engine.calls[-1][0][:2] in ([17, 116], [17, 117])  # Items 100 and 101: user 2 and user 1.


def test_a_code_of_the_options(table: Server, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--every", "5", "--candidates", "3", "--digits", "2", "--json"]
    assert main(["replay", str(log), "--server", table.url, *options]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert total["history_tokens"] == 2 * 2 * (5 + 10 + 15 + 20)
    # 64 tokens of items, 16 of them reserved, make 24 values per digit: item 100 is 4 * 24 + 4.
    assert [20, 44] in [tokens[:2] for tokens, _, _ in table.engine.calls]


def test_requests_that_fail_are_counted(table: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "other.csv"
    log.write_text(LOG.replace(",139,", ",7,"))
    assert main(["replay", str(log), "--server", table.url, "--every", "5", "--candidates", "3", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["total"]["failed"] > 0
    assert all("HTTP 400: item 7 is not in the model's catalogue" in reason for reason in report["failures"])


def test_no_users_is_refused(table: Server, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--server", table.url, "--no-users"]) == 2
    assert "A ranking request names its user: leave --no-users out" in capsys.readouterr().err


def test_an_unknown_model(table: Server, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--server", table.url, "--model", "other"]) == 2
    assert "not the model 'other'" in capsys.readouterr().err


def test_servers_without_a_ranking_model(tmp_path: Path) -> None:
    with FakeModelServer() as completions:
        assert asyncio.run(find_ranking_model(completions.url, 5)) is None
    assert asyncio.run(find_ranking_model("http://127.0.0.1:9", 5)) is None
    app, _ = make_app({"vocab_size": 128}, tmp_path)
    with serving(app) as url:
        assert asyncio.run(find_ranking_model(url, 5)) is None


def info(items: dict[str, str | int]) -> RankInfo:
    return RankInfo("m", "head", ("click",), (1.0,), items, 64, 1024)


def test_codes() -> None:
    assert codec_of(info({"kind": "table", "count": 9, "reserved": 16})) is CATALOGUE
    assert CATALOGUE.encode_many([5, 2**40]) == [5, 2**40]
    assert codec_of(info({"kind": "codec", "base": 9, "digits": 3, "reserved": 4})) == ItemCodec(9, 3, 4)
    with pytest.raises(InvalidSettingError, match="give --digits and --vocab-size"):
        codec_of(info({"kind": "graph"}))


def test_a_server_that_goes_away(table: Server) -> None:
    async def send() -> Any:
        target = RankTarget(table.url, CATALOGUE, model=None, timeout_s=5)
        gone = RankTarget("http://127.0.0.1:9", CATALOGUE, model=None, timeout_s=5)
        try:
            await target.start()
            return await target.send([100, 101, 110], "u", 2), await gone.send([100, 101, 110], "u", 2)
        finally:
            await target.close()
            await gone.close()

    answered, failed = asyncio.run(send())
    assert (answered.ok, answered.prompt_tokens, answered.cached_tokens) == (True, 3, 0)
    assert not failed.ok
    assert "cannot be reached" in failed.error
