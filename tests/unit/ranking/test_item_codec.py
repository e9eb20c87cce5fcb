"""ItemCodec: injective, typed by position, exact about its limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError
from userkv.ranking.item_codec import ItemCodec

CODECS = st.builds(ItemCodec, base=st.integers(2, 5000), digits=st.integers(1, 4), reserved=st.integers(0, 64))


@st.composite
def codec_and_items(draw: st.DrawFn) -> tuple[ItemCodec, list[int]]:
    codec = draw(CODECS)
    return codec, draw(st.lists(st.integers(0, codec.capacity - 1), max_size=20))


@given(codec_and_items())
def test_decoding_gives_the_items_back(case: tuple[ItemCodec, list[int]]) -> None:
    codec, items = case
    assert codec.decode(codec.encode_many(items)) == items


@given(codec_and_items())
def test_the_vectorised_code_is_the_plain_one(case: tuple[ItemCodec, list[int]]) -> None:
    codec, items = case
    assert codec.encode_many(items) == [token for item in items for token in codec.encode(item)]
    assert codec.encode_many(np.array(items, dtype=np.int64)) == codec.encode_many(items)


@given(codec_and_items())
def test_each_position_has_its_own_tokens(case: tuple[ItemCodec, list[int]]) -> None:
    codec, items = case
    for item in items:
        for position, token in enumerate(codec.encode(item)):
            assert (token - codec.reserved) // codec.base == position


@pytest.mark.parametrize(("base", "digits"), [(2, 1), (2, 4), (7, 3), (40, 2)])
def test_no_two_items_share_a_code(base: int, digits: int) -> None:
    codec = ItemCodec(base, digits)
    assert len({codec.encode(item) for item in range(codec.capacity)}) == codec.capacity == base**digits


@given(vocab=st.integers(1, 20_000), digits=st.integers(1, 5), reserved=st.integers(0, 100))
def test_a_code_for_a_vocabulary_stays_inside_it(vocab: int, digits: int, reserved: int) -> None:
    try:
        codec = ItemCodec.for_vocab(vocab, digits, reserved)
    except InvalidSettingError:
        assert vocab < reserved + 2 * digits
        return
    assert max(codec.encode(codec.capacity - 1)) < vocab
    assert min(codec.encode(0)) == reserved
    assert codec.tokens_per_item == digits
    assert vocab - (reserved + digits * codec.base) < digits  # the largest base that fits


def test_the_bundled_vocabulary() -> None:
    codec = ItemCodec.for_vocab(4352)
    assert (codec.base, codec.capacity) == (2168, 2168**2)
    assert codec.encode(0) == (16, 2184)
    assert codec.encode(2169) == (17, 2185)


@pytest.mark.parametrize("item", [-1, 100, 2**63, 2**64, -(2**70)])
def test_an_item_out_of_range_is_named_with_the_capacity(item: int) -> None:
    codec = ItemCodec(base=10, digits=2)
    for encode in (codec.encode, lambda bad: codec.encode_many([3, bad, 4])):
        with pytest.raises(InvalidSettingError, match=rf"{item}.*(100|99)"):
            encode(item)


@pytest.mark.parametrize("item", [1.0, 1.5, "3", None, [1]])
def test_what_is_no_integer_is_refused(item: object) -> None:
    codec = ItemCodec(base=10, digits=2)
    with pytest.raises(InvalidSettingError, match="integer"):
        codec.encode(item)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="integer"):
        codec.encode_many([item])  # type: ignore[list-item]


def test_a_capacity_beyond_64_bits_works() -> None:
    codec = ItemCodec(base=2**20, digits=4)
    items = [2**79, 5, codec.capacity - 1]
    assert codec.decode(codec.encode_many(items)) == items
    with pytest.raises(InvalidSettingError, match="more digits"):
        codec.encode_many([codec.capacity])


@pytest.mark.parametrize("numbers", [{"base": 1}, {"digits": 0}, {"reserved": -1}])
def test_numbers_that_make_no_code(numbers: dict[str, int]) -> None:
    with pytest.raises(InvalidSettingError):
        ItemCodec(**{"base": 10, "digits": 2, "reserved": 0, **numbers})


def test_no_digits_for_a_vocabulary() -> None:
    with pytest.raises(InvalidSettingError, match="at least 1"):
        ItemCodec.for_vocab(4352, digits=0)


@pytest.mark.parametrize(
    ("tokens", "reason"), [([16], "whole number"), ([26, 26], "digit 0"), ([16, 16], "digit 1"), ([0, 26], "digit 0")]
)
def test_tokens_that_are_no_items(tokens: list[int], reason: str) -> None:
    with pytest.raises(InvalidSettingError, match=reason):
        ItemCodec(base=10, digits=2).decode(tokens)
