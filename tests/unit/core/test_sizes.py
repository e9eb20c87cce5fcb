"""Sizes as people write them: one meaning everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError
from userkv.core.sizes import GIB, KIB, MIB, TIB, format_size, parse_size

EXPONENTS = {"k": 1, "m": 2, "g": 3, "t": 4}


@st.composite
def units(draw: st.DrawFn) -> tuple[str, int]:
    """A unit in any case, and its number of bytes."""
    prefix = draw(st.sampled_from("kmgt"))
    suffix = draw(st.sampled_from(["", "b", "i", "ib"]).filter(lambda text: text != "i"))
    base = 1000 if suffix == "b" else 1024
    text = "".join(draw(st.sampled_from([letter, letter.upper()])) for letter in prefix + suffix)
    return text, base ** EXPONENTS[prefix]


@given(number=st.integers(0, 9999), unit=units(), space=st.sampled_from(["", " ", "  "]))
def test_a_whole_number_counts_units_of_1000_with_b_and_of_1024_otherwise(
    number: int, unit: tuple[str, int], space: str
) -> None:
    text, nbytes = unit
    assert parse_size("x", f"{number}{space}{text}") == number * nbytes


@given(st.integers(0, 10**15 - 1))
def test_a_number_alone_is_bytes(number: int) -> None:
    assert parse_size("x", number) == parse_size("x", str(number)) == parse_size("x", f"{number} B") == number


@given(whole=st.integers(0, 999), tenths=st.integers(0, 9), unit=units())
def test_a_fraction_lies_between_its_whole_neighbours(whole: int, tenths: int, unit: tuple[str, int]) -> None:
    size = parse_size("x", f"{whole}.{tenths}{unit[0]}")
    assert whole * unit[1] <= size < (whole + 1) * unit[1]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("1g", 2**30),
        ("4GiB", 4 << 30),
        ("512MB", 512_000_000),
        ("1 kb", 1000),
        ("1k", 1024),
        ("1.5 TiB", 3 << 39),
        (" 2mib ", 2 << 20),
        ("100b", 100),
        ("0", 0),
        (0, 0),
        (7, 7),
    ],
)
def test_sizes_that_people_write(text: object, size: int) -> None:
    assert parse_size("x", text) == size


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "1e9", "1i", "1ib", "0x10", "\u0661GiB", "1.GiB", "1 2", "9" * 16, "-1", -1, True, None, 1.5, 1e9],
)
def test_what_is_not_a_size_is_refused_with_the_name_of_its_option(value: object) -> None:
    with pytest.raises(InvalidSettingError, match=r'^local_dram_bytes must be a size such as "4GiB"'):
        parse_size("local_dram_bytes", value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (1536 * KIB, "1.5 MiB"),
        (512 * MIB, "512 MiB"),
        (8 * GIB, "8 GiB"),
        (2 * TIB, "2 TiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 2**53))
def test_a_shown_size_can_be_read_back_to_about_four_digits(nbytes: int) -> None:
    read = parse_size("x", format_size(nbytes))
    assert abs(read - nbytes) <= nbytes / 1000 + 1
