import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from userkv.records.keys import LayerMooncakeUserKey, MooncakeUserKey, ValueType, parse_key

hostile = st.text(alphabet=st.sampled_from("a@%/|.*x0 1\x00é😀"), max_size=8) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=20
)


@st.composite
def keys(draw: st.DrawFn) -> MooncakeUserKey | LayerMooncakeUserKey:
    world_size = draw(st.integers(1, 16))
    key = MooncakeUserKey(
        uid=draw(hostile),
        model_name=draw(hostile),
        world_size=world_size,
        worker_id=draw(st.integers(0, world_size - 1)),
        value_type=draw(st.sampled_from(ValueType)),
        extent_id=draw(st.none() | st.integers(0, 2**64)),
    )
    return draw(st.sampled_from([key, LayerMooncakeUserKey(key, draw(st.integers(0, 128)))]))


@given(keys(), keys())
@example(
    MooncakeUserKey("1", "2x", 1, 0, ValueType.TOKEN_ID),
    MooncakeUserKey("12", "x", 1, 0, ValueType.TOKEN_ID),
)
@example(
    LayerMooncakeUserKey(MooncakeUserKey("u", "m", 1, 0, ValueType.KV_CACHE), 3),
    MooncakeUserKey("u", "m", 1, 0, ValueType.KV_CACHE, extent_id=3),
)
def test_different_keys_render_differently(a: object, b: object) -> None:
    assert (str(a) == str(b)) == (a == b)


@given(keys())
def test_a_key_can_be_read_back(key: MooncakeUserKey | LayerMooncakeUserKey) -> None:
    assert parse_key(str(key)) == key


@given(hostile)
def test_no_user_id_forges_another_users_key(uid: str) -> None:
    text = str(MooncakeUserKey(uid, "m", 1, 0, ValueType.TOKEN_ID))
    assert text.count("@") == 4
    assert text.isascii()
    assert not set("*/ |\x00") & set(text)


def test_the_documented_format() -> None:
    key = MooncakeUserKey("u@1", "m/v2", 2, 1, ValueType.KV_CACHE, extent_id=255)
    assert str(key) == "u%401@m%2Fv2@2@1@kv_cache@xff"
    assert [str(layer) for layer in key.split_layers(2)] == [
        "u%401@m%2Fv2@2@1@kv_cache@0@xff",
        "u%401@m%2Fv2@2@1@kv_cache@1@xff",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "u@m@1@0",
        "u@m@1@0@kv",
        "u@m@1@1@kv_cache",
        "u@m@1@0@kv_cache@x0f",
        "u@m@01@0@kv_cache",
        "a b@m@1@0@kv_cache",
    ],
)
def test_what_no_key_renders_as_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_key(text)


@pytest.mark.parametrize("arguments", [(0, 0), (2, 2), (2, -1)])
def test_workers_that_do_not_exist_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        MooncakeUserKey("u", "m", *arguments, ValueType.KV_CACHE)
