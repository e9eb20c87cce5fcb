import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.tokens import as_tokens, common_prefix

token_lists = st.lists(st.integers(0, 3), max_size=40)


@given(token_lists, token_lists)
def test_common_prefix_equals_the_obvious_loop(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(as_tokens(a), as_tokens(b)) == expected


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40))
def test_tokens_are_kept_exactly_and_cannot_be_changed(ids: list[int]) -> None:
    tokens = as_tokens(ids)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == ids
    assert not tokens.flags.writeable


@pytest.mark.parametrize(("ids", "error"), [([2**31], OverflowError), (["1"], TypeError), ([1.0], TypeError)])
def test_what_is_no_token_id_is_refused(ids: list[object], error: type[Exception]) -> None:
    with pytest.raises(error):
        as_tokens(ids)  # type: ignore[arg-type]
