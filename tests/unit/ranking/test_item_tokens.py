"""Items to tokens, many at once: the same as one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidUserRequestError
from userkv.ranking.spec import RankingSpec, load_spec

ITEMS = {"table": {"kind": "table", "reserved": 16}, "codec": {"kind": "codec", "base": 6, "digits": 2, "reserved": 16}}
FORMS = ({"candidate_offset": 30}, {"candidate_marker": 3})


def spec_of(directory: Path, kind: str, form: dict[str, int], longest: int | None) -> RankingSpec:
    section = {"items": ITEMS[kind], **form, "max_item_tokens": longest}
    (directory / "config.json").write_text(json.dumps({"vocab_size": 60, "userkv_ranking": section}))
    (directory / "items.json").write_text(json.dumps(list(range(12))))
    return load_spec(directory)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[RankingSpec]:
    return [
        spec_of(tmp_path_factory.mktemp("model"), kind, form, longest)
        for kind in ITEMS
        for form in FORMS
        for longest in (None, 2)
    ]


def faults(spec: RankingSpec, items: list[Any]) -> set[str]:
    found = set()
    for item in items:
        try:
            spec.tokens(item)
        except InvalidUserRequestError as error:
            found.add(str(error))
    return found


def one_by_one(spec: RankingSpec, history: list[Any], candidates: list[Any]) -> Any:
    assert spec.format is not None
    before = [token for item in history for token in spec.tokens(item)]
    after = [token for item in candidates for token in spec.format.candidate(spec.tokens(item))]
    return before + after, len(before), len(candidates)


def at_once(spec: RankingSpec, history: list[Any], candidates: list[Any]) -> Any:
    try:
        prompt = spec.prompt(history, candidates)
    except InvalidUserRequestError as error:
        return str(error)
    assert all(type(token) is int for token in prompt.token_ids)
    return prompt.token_ids, prompt.history_len, prompt.num_candidates


TOKEN = st.integers(0, 29) | st.sampled_from([-1, 3, 30, 59, 60, 2**63, 2**70])
GOOD_ITEM = st.integers(0, 11) | st.lists(st.integers(4, 29), min_size=1, max_size=2)
ANY_ITEM = (
    GOOD_ITEM
    | st.lists(TOKEN, max_size=4)
    | st.tuples(TOKEN)
    | st.sampled_from([12, 40, -1, 2**70, True, 1.5, "11", b"1", None, [True], [1.0], ["1"], [[1]], {}])
)


@given(data=st.data(), which=st.integers(0, 7))
def test_prompts_are_made_of_the_items_one_by_one(specs: list[RankingSpec], data: st.DataObject, which: int) -> None:
    spec = specs[which]
    good = data.draw(st.booleans())
    items = st.lists(GOOD_ITEM, max_size=8) | st.lists(st.integers(0, 11), max_size=8)
    items = items if good else st.lists(ANY_ITEM, max_size=6)
    history, candidates = data.draw(items), data.draw(items)
    result = at_once(spec, history, candidates)
    wrong = faults(spec, history) or faults(spec, candidates)
    if wrong:
        assert result in wrong  # Of several wrong items it may name any.
        assert not good
    else:
        assert result == one_by_one(spec, history, candidates)
