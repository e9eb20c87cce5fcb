"""RankingSpec: from a model's config.json and a request's items to a prompt, or one sentence that says why not."""

import json
from pathlib import Path
from typing import Any

import pytest

from userkv.core.errors import InvalidSettingError, InvalidUserRequestError
from userkv.ranking.history_window import HistoryWindow
from userkv.ranking.spec import Item, RankingSpec, load_spec

TABLE: dict[str, Any] = {
    "vocab_size": 40,
    "userkv_ranking": {"candidate_offset": 20, "items": {"kind": "table", "reserved": 16}},
    "tasks": ["click", "like"],
    "task_weights": [1, 0.5],
    "max_sequence_length": 4,
    "max_item_tokens": 2,
}
CODEC: dict[str, Any] = {
    "vocab_size": 36,
    "userkv_ranking": {
        "candidate_marker": 3,
        "items": {"kind": "codec", "base": 10, "digits": 2, "reserved": 16},
        "score": "logprob",
    },
}
LABEL: dict[str, Any] = {
    "vocab_size": 100,
    "userkv_ranking": {"items": {"kind": "codec", "base": 80, "digits": 1, "reserved": 16}, "score": "label"},
}


def written(directory: Path, config: object, items: object = (70, 7, 700, 1)) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "items.json").write_text(json.dumps(items))
    return directory


@pytest.fixture
def table(tmp_path: Path) -> RankingSpec:
    return load_spec(written(tmp_path, TABLE))


def test_a_table(table: RankingSpec) -> None:
    prompt = table.prompt([7, 700], [70, 1])
    assert prompt.token_ids == [17, 18, 16 + 20, 19 + 20]
    assert (prompt.history_len, prompt.num_candidates) == (2, 2)
    assert (table.score, table.tasks, table.task_weights) == ("head", ("click", "like"), (1.0, 0.5))
    assert (table.max_history_tokens, table.max_item_tokens) == (4, 2)


def test_a_code_and_a_marker() -> None:
    spec = RankingSpec.from_config(CODEC)
    assert spec.prompt([12], [7, 99]).token_ids == [16 + 1, 26 + 2, 3, 16 + 0, 26 + 7, 3, 16 + 9, 26 + 9]
    assert (spec.score, spec.tasks, spec.task_weights) == ("logprob", ("score",), (1.0,))
    assert spec.max_history_tokens is None


def test_labels_are_in_no_prompt() -> None:
    spec = RankingSpec.from_config(LABEL)
    prompt = spec.prompt([1, 2], [3, 4, 5])
    assert (prompt.token_ids, prompt.history_len, prompt.num_candidates) == ([17, 18], 2, 3)
    with pytest.raises(InvalidUserRequestError, match="2 tokens; a label is one token"):
        spec.prompt([], [[17, 18]])


def test_tokens_stand_for_themselves(table: RankingSpec) -> None:
    assert table.prompt([[16, 17]], [[5, 19]]).token_ids == [16, 17, 25, 19]


@pytest.mark.parametrize(
    ("history", "candidates", "reason"),
    [
        ([8], [], "item 8 is not in the model's catalogue"),
        ([], [-1], "item -1 is not in the model's catalogue"),
        ([[]], [], "must be tokens from 0 to 39"),
        ([[40]], [], "must be tokens from 0 to 39"),
        ([[-1]], [], "must be tokens from 0 to 39"),
        ([[1.0]], [], "must be tokens from 0 to 39"),
        ([[True]], [], "must be tokens from 0 to 39"),
        ([[1, 2, 3]], [], "more than the model's 2 tokens"),
        ([[16, 20]], [], "reserved for the start of a candidate"),
        ([], [[39]], "reserved for the start of a candidate"),
        (["7"], [], "an integer or a list of tokens"),
        ([True], [], "an integer or a list of tokens"),
        ([None], [], "an integer or a list of tokens"),
        ([7.0], [], "an integer or a list of tokens"),
        ([7] * 5, [], "the history has 5 tokens and the model takes 4"),
    ],
)
def test_requests_that_are_refused(
    table: RankingSpec, history: list[Item], candidates: list[Item], reason: str
) -> None:
    with pytest.raises(InvalidUserRequestError) as caught:
        table.prompt(history, candidates)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_code_that_has_no_such_item() -> None:
    with pytest.raises(InvalidUserRequestError, match="does not fit"):
        RankingSpec.from_config(CODEC).prompt([100], [])
    with pytest.raises(InvalidUserRequestError, match="reserved for the start of a candidate"):
        RankingSpec.from_config(CODEC).prompt([[17, 3]], [])


def section(**changes: Any) -> dict[str, Any]:
    return {**TABLE, "userkv_ranking": {**TABLE["userkv_ranking"], **changes}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"vocab_size": 40}, "no section 'userkv_ranking'"),
        ({**TABLE, "userkv_ranking": [1]}, "no section 'userkv_ranking'"),
        (section(score="best"), "score must be one of head, logprob, label"),
        (section(tasks=["a", "b", "c"]), "3 tasks and 2 task_weights"),
        (section(score="logprob"), "a log-probability is one task, not 2"),
        (section(candidate_marker=3), "either candidate_offset or candidate_marker"),
        (section(items={"kind": "list"}), "items.kind must be 'codec' or 'table', not 'list'"),
        (section(items=None), "items.kind must be"),
        (section(items=[1]), "items must be a JSON object"),
        (section(items={"kind": "table", "reserved": -1}), "items.reserved must be a whole number of at least 0"),
        (section(items={"kind": "codec", "base": 10}), "items.digits must be a whole number of at least 1, not None"),
        (section(task_weights=["1", 2]), "task_weights must be numbers"),
        (section(max_history_tokens="9"), "max_history_tokens must be a whole number of at least 1, not '9'"),
        (section(max_item_tokens=0), "max_item_tokens must be a whole number of at least 1, not 0"),
        ({**TABLE, "vocab_size": None}, "vocab_size must be a whole number"),
        ([1], "is no JSON object"),
    ],
)
def test_sections_that_are_wrong(tmp_path: Path, config: object, reason: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        load_spec(written(tmp_path, config))
    assert reason in str(caught.value)


@pytest.mark.parametrize("items", [{"1": 2}, [1, "2"], [1, 1], [1.5], [True]])
def test_item_tables_that_are_wrong(tmp_path: Path, items: object) -> None:
    with pytest.raises(InvalidSettingError, match="must be a list of different integers"):
        load_spec(written(tmp_path, TABLE, items))


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match="is no model's directory"):
        load_spec(tmp_path)
    written(tmp_path, TABLE)
    (tmp_path / "items.json").unlink()
    with pytest.raises(InvalidSettingError, match=r"item table .* cannot be read"):
        load_spec(tmp_path)
    with pytest.raises(InvalidSettingError, match="need a local model directory"):
        RankingSpec.from_config(TABLE)


def test_a_history_window(tmp_path: Path) -> None:
    section = {**TABLE["userkv_ranking"], "history_window": {"max_items": 4, "drop_items": 2}}
    spec = load_spec(written(tmp_path, {**TABLE, "userkv_ranking": section}))
    assert spec.history_window == HistoryWindow(4, 2)
    for wrong in ({"max_items": 4}, 4, {"max_items": 4, "drop_items": 5}):
        with pytest.raises(InvalidSettingError, match="window"):
            load_spec(written(tmp_path, {**TABLE, "userkv_ranking": {**section, "history_window": wrong}}))


def test_candidates_need_tokens_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match="there are 40 tokens, but vocab_size is 39"):
        load_spec(written(tmp_path, {**TABLE, "vocab_size": 39}))


def test_an_item_has_few_tokens_whatever_the_model_says() -> None:
    spec = RankingSpec.from_config(CODEC)
    assert spec.prompt([], [[20] * 32]).num_candidates == 1
    with pytest.raises(InvalidUserRequestError, match="more than the model's 32 tokens"):
        spec.prompt([], [[20] * 33])
