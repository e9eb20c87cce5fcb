"""``POST /v1/rank`` and ``GET /v1/rank``: what a client gets, from a made-up engine."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from tests.support.ranking import CODEC, LABEL, TABLE, FakeEngine, label_score, make_app, task_scores
from userkv.client.wire import RankInfo, RankRequest, RankResult
from userkv.ranking.history_window import HistoryWindow
from userkv.serving.rank.routes import STATE

BODY = {"user_id": "u", "history": [100, 101, 102], "candidates": [110, 111, 112, 110]}


class Served:
    def __init__(self, config: dict[str, Any], directory: Path) -> None:
        self.app, self.engine = make_app(config, directory, ["ranker", "alias"])
        self.http = TestClient(self.app)

    def rank(self, **fields: Any) -> RankResult:
        """A request that succeeds; the answer has the documented shape."""
        answer = self.http.post("/v1/rank", json={**BODY, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        return msgspec.json.decode(answer.content, type=RankResult)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("KV_MANAGER_FOR_GR", "1")
    return Served(TABLE, tmp_path)


def user_of(engine: FakeEngine) -> Any:
    params = engine.calls[-1][1]
    extra = params.extra_args if engine.label else params.extra_kwargs
    return extra and extra["kv_transfer_params"]


def test_scores_in_the_order_of_the_candidates(table: Served) -> None:
    result = table.rank()
    expected = [task_scores([64 + 16 + item - 100], 2) for item in BODY["candidates"]]  # type: ignore[union-attr]
    assert [score.item for score in result.scores] == BODY["candidates"]
    assert [score.tasks for score in result.scores] == [{"click": a, "like": b} for a, b in expected]
    assert [score.score for score in result.scores] == pytest.approx([a + 0.5 * b for a, b in expected])
    assert result.model == "ranker"
    assert (result.usage.history_tokens, result.usage.candidate_tokens) == (3, 4)
    assert result.timing.total_ms >= result.timing.engine_ms + result.timing.prepare_ms > 0


def test_what_the_engine_is_asked(table: Served) -> None:
    table.rank()
    (tokens, params, _) = table.engine.calls[-1]
    assert tokens == [16, 17, 18, 90, 91, 92, 90]
    assert params.task == "classify"
    assert user_of(table.engine) == {"user_id": "u", "history_len": 3, "stage": "rank"}


def test_an_engine_without_user_cache_is_told_of_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_MANAGER_FOR_GR", raising=False)
    served = Served(TABLE, tmp_path)
    served.rank()
    assert user_of(served.engine) is None


def test_the_ranking_is_best_first_and_ties_keep_their_order(table: Served) -> None:
    candidates = list(range(100, 140))
    result = table.rank(candidates=candidates)
    by_score = sorted(result.scores, key=lambda score: -score.score)
    assert len({score.score for score in result.scores}) < len(candidates)  # There are ties.
    assert list(result.ranking) == [score.item for score in by_score]


@pytest.mark.parametrize(("top_k", "length"), [(1, 1), (3, 3), (4, 4), (99, 4), (None, 4)])
def test_top_k_limits_the_ranking_and_not_the_scores(table: Served, top_k: int | None, length: int) -> None:
    result = table.rank(top_k=top_k)
    assert len(result.ranking) == length
    assert len(result.scores) == 4


def test_items_as_tokens_stand_for_themselves(table: Served) -> None:
    as_ids = table.rank(history=[100, 101], candidates=[110, 111])
    as_tokens = table.rank(history=[[16], [17]], candidates=[[26], 111])
    assert [score.score for score in as_ids.scores] == [score.score for score in as_tokens.scores]
    assert as_tokens.scores[0].item == [26]
    assert [26] in as_tokens.ranking


def test_prefill_has_no_scores(table: Served) -> None:
    for fields in ({"candidates": []}, {"candidates": []} | {"top_k": 3}):
        result = table.rank(stage="prefill", **fields)
        assert (result.scores, result.ranking) == ((), ())
        assert user_of(table.engine) == {"user_id": "u", "history_len": 3, "stage": "prefill"}


def test_a_user_without_history_is_ranked(table: Served) -> None:
    result = table.rank(history=[])
    assert len(result.scores) == 4
    assert result.usage.history_tokens == 0


def test_the_cached_tokens_by_tier(table: Served) -> None:
    table.engine.tiers = {"hbm": 1, "dram": 0, "ssd": 2}
    cached = table.rank().usage.cached_tokens
    assert (cached.hbm, cached.dram, cached.ssd, cached.total) == (1, 0, 2, 3)


def test_an_engine_that_does_not_know_tiers_has_hbm_only(table: Served) -> None:
    table.engine.cached = 2
    cached = table.rank().usage.cached_tokens
    assert (cached.hbm, cached.dram, cached.ssd, cached.total) == (2, 0, 0, 2)


def test_a_long_history_is_cut_by_the_models_window(table: Served) -> None:
    service = getattr(table.app.state, STATE)
    spec = dataclasses.replace(service.spec, history_window=HistoryWindow(max_items=4, drop_items=2))
    setattr(table.app.state, STATE, dataclasses.replace(service, spec=spec))
    result = table.rank(history=[100, 101, 102, 103, 104, 105, 106])
    assert result.usage.history_items_dropped == 4
    assert table.engine.calls[-1][0][:3] == [20, 21, 22]
    assert result.usage.history_tokens == 3
    assert table.http.get("/v1/rank").json()["history_window"] == {"max_items": 4, "drop_items": 2}


def test_any_of_the_models_names_will_do(table: Served) -> None:
    assert table.rank(model="alias").model == "alias"
    assert table.rank(model=None).model == "ranker"


def test_the_clients_request_id(table: Served) -> None:
    answer = table.http.post("/v1/rank", json=BODY, headers={"X-Request-Id": "abc"})
    assert answer.json()["id"] == table.engine.calls[-1][2] == "rank-abc"
    assert table.rank().id != table.rank().id


def test_the_weights_version_that_is_served(table: Served) -> None:
    assert table.rank(weights_version="default")
    table.engine.version = "day-2"
    assert table.rank(weights_version="day-2")
    assert table.http.get("/v1/rank").json()["weights_version"] == "day-2"


def test_the_operators_name_of_the_weights(table: Served) -> None:
    extra = {"kv_connector_extra_config": {"weights_version": "day-1"}}
    table.engine.vllm_config.kv_transfer_config = type("Transfer", (), extra)
    assert table.rank(weights_version="day-1")


def test_a_marker_and_a_log_probability(tmp_path: Path) -> None:
    served = Served(CODEC, tmp_path)
    result = served.rank(history=[1], candidates=[205, [16, 120]])
    assert served.engine.calls[-1][0] == [16, 117, 3, 18, 121, 3, 16, 120]
    assert [score.score for score in result.scores] == [
        task_scores([3, 18, 121], 1)[0],
        task_scores([3, 16, 120], 1)[0],
    ]
    assert [score.tasks for score in result.scores] == [None, None]
    assert (result.usage.history_tokens, result.usage.candidate_tokens) == (2, 6)


def test_labels_are_scored_in_requests_of_128(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_MANAGER_FOR_GR", "1")
    served = Served(LABEL, tmp_path)
    candidates = [*range(300), 7, 7]
    result = served.rank(history=[1, 2], candidates=candidates)
    assert [score.score for score in result.scores] == [label_score([17, 18], 16 + item) for item in candidates]
    assert [len(params.logprob_token_ids) for _, params, _ in served.engine.calls] == [128, 128, 44]
    assert {tuple(tokens) for tokens, _, _ in served.engine.calls} == {(17, 18)}
    assert len({request_id for _, _, request_id in served.engine.calls}) == 3
    assert user_of(served.engine) == {"user_id": "u", "history_len": 2, "stage": "rank"}
    assert (result.usage.history_tokens, result.usage.candidate_tokens) == (2, 302)


def test_prefill_of_a_decoder_asks_for_no_labels(tmp_path: Path) -> None:
    served = Served(LABEL, tmp_path)
    assert served.rank(history=[1, 2], candidates=[], stage="prefill").scores == ()
    ((tokens, params, _),) = served.engine.calls
    assert tokens == [17, 18]
    assert params.logprob_token_ids is None


def test_what_the_model_takes(table: Served) -> None:
    answer = table.http.get("/v1/rank")
    assert answer.status_code == 200
    info = msgspec.json.decode(answer.content, type=RankInfo)
    assert (info.model, info.score, info.tasks, info.task_weights) == ("ranker", "head", ("click", "like"), (1.0, 0.5))
    assert info.items == {"kind": "table", "count": 40, "reserved": 16}
    assert (info.item_vocab_size, info.max_model_len, info.max_item_tokens) == (64, 1024, 2)
    assert (info.max_history_tokens, info.history_window, info.weights_version) == (None, None, "default")


def test_openapi_documents_every_field(table: Served) -> None:
    paths = table.http.get("/openapi.json").json()["paths"]["/v1/rank"]
    post = paths["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(RankRequest.__struct_fields__)
    assert set(body["required"]) == {"user_id", "history"}
    for name, schema in body["properties"].items():
        assert "description" in schema or any("description" in kind for kind in schema["anyOf"]), name
    assert body["properties"]["history"]["examples"]
    for code in ("200", "400", "404", "409", "415", "500", "501", "503"):
        assert post["responses"][code]["content"]["application/json"]["schema"]["properties"], code
    assert set(post["responses"]["200"]["content"]["application/json"]["schema"]["properties"]) == {
        *("id", "model", "scores", "ranking", "usage", "timing")
    }
    assert "$ref" not in str(post)
    assert paths["get"]["responses"]["200"]["content"]["application/json"]["schema"]["properties"]["tasks"]
