from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidUserRequestError
from userkv.core.request import UserRequest, foreign_params


def test_all_fields() -> None:
    params = {"user_id": "u", "history_len": 3, "stage": "prefill", "read": False, "write": True}
    assert UserRequest.parse(params, 5) == UserRequest("u", 3, "prefill", False, True)


def test_history_is_the_whole_prompt_by_default() -> None:
    assert UserRequest.parse({"user_id": "u"}, 5) == UserRequest("u", 5)
    assert UserRequest.parse({"user_id": "u", "history_len": None}, 5) == UserRequest("u", 5)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "h"},
        {"transfer_id": "x", "tp_size": 2},
        {"storage": 1, "thread": 2},
    ],
)
def test_other_requests_are_ordinary(params: dict[str, Any] | None) -> None:
    assert UserRequest.parse(params, 5) is None


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([], "must be an object, not list"),
        ({"user_id": 7}, "must be a string, not int"),
        ({"user_id": None}, "must be a string, not null"),
        ({"user_id": ""}, "1 to 256 bytes of UTF-8, not 0"),
        ({"user_id": "x" * 257}, "1 to 256 bytes of UTF-8, not 257"),
        ({"user_id": "é" * 129}, "1 to 256 bytes of UTF-8, not 258"),
        ({"user_id": "\ud800"}, "not valid Unicode"),
        ({"user_id": "u", "history_len": -1}, "between 0 and the prompt's 5 tokens, but it is -1"),
        ({"user_id": "u", "history_len": 6}, "between 0 and the prompt's 5 tokens, but it is 6"),
        ({"user_id": "u", "history_len": 2.0}, "must be an integer number of tokens, not float"),
        ({"user_id": "u", "history_len": True}, "must be an integer number of tokens, not bool"),
        ({"user_id": "u", "history_len": "3"}, "must be an integer number of tokens, not str"),
        ({"user_id": "u", "stage": "decode"}, "stage must be one of rank, prefill, not 'decode'"),
        ({"user_id": "u", "stage": ["rank"]}, "stage must be one of"),
        ({"user_id": "u", "read": 1}, "read must be true or false, not int"),
        ({"user_id": "u", "write": "no"}, "write must be true or false, not str"),
        ({"history_len": 3}, "'history_len' without 'user_id'"),
        ({"write": False, "do_remote_decode": True}, "'write' without 'user_id'"),
        ({"userid": "u"}, "did you mean 'user_id'"),
        ({"UserId": "u"}, "did you mean 'user_id'"),
        ({"uid": "u"}, "did you mean 'user_id'"),
        ({"user_id": "u", "history_length": 3}, "did you mean 'history_len'"),
        ({"user_id": "u", "histroy_len": 3}, "did you mean 'history_len'"),
        ({"user_id": "u", "historyLen": 3}, "did you mean 'history_len'"),
        ({"user_id": "u", "stages": "rank"}, "did you mean 'stage'"),
    ],
)
def test_bad_input_gets_one_clear_sentence(params: Any, says: str) -> None:
    with pytest.raises(InvalidUserRequestError) as error:
        UserRequest.parse(params, 5)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(min_size=1, max_size=64), st.integers(0, 10))
def test_any_text_names_a_user(user_id: str, history_len: int) -> None:
    try:
        valid = 1 <= len(user_id.encode()) <= 256
    except UnicodeEncodeError:
        valid = False
    if valid:
        request = UserRequest.parse({"user_id": user_id, "history_len": history_len}, 10)
        assert request == UserRequest(user_id, history_len)


@given(st.dictionaries(st.text(max_size=12), st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))))
def test_anything_is_parsed_or_refused(params: dict[str, Any]) -> None:
    try:
        request = UserRequest.parse(params, 5)
    except InvalidUserRequestError:
        return
    assert (request is None) == ("user_id" not in params)


def test_other_connectors_keep_their_parameters() -> None:
    assert foreign_params({"user_id": "u", "history_len": 1, "remote_host": "h"}) == {"remote_host": "h"}
    assert foreign_params({"user_id": "u"}) is None
    assert foreign_params(None) is None
