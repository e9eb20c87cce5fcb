"""HistoryWindow: within its bounds, stable between drops, and a plain cut where it is none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError
from userkv.ranking.history_window import HistoryWindow

WINDOWS = st.integers(1, 60).flatmap(
    lambda max_items: st.builds(HistoryWindow, st.just(max_items), st.integers(1, max_items))
)
LENGTHS = st.integers(0, 500)


@given(WINDOWS, LENGTHS)
def test_the_newest_items_stay_and_their_number_has_bounds(window: HistoryWindow, length: int) -> None:
    cut = window.cut(range(length))
    assert list(cut) == list(range(window.start(length), length))
    if length <= window.max_items:
        assert len(cut) == length
    else:
        assert window.max_items - window.drop_items < len(cut) <= window.max_items


@given(WINDOWS)
def test_of_drop_items_new_items_one_changes_the_prefix(window: HistoryWindow) -> None:
    lengths = range(window.max_items, window.max_items + 5 * window.drop_items)
    changed = [length + 1 for length in lengths if window.start(length) != window.start(length + 1)]
    assert changed == list(range(window.max_items + 1, lengths.stop + 1, window.drop_items))
    for length in lengths:
        before, after = window.cut(range(length)), window.cut(range(length + 1))
        if length + 1 not in changed:
            assert list(after[:-1]) == list(before)


@given(WINDOWS, LENGTHS)
def test_a_drop_is_one_block(window: HistoryWindow, length: int) -> None:
    assert window.start(length) % window.drop_items == 0
    assert window.start(length + 1) - window.start(length) in (0, window.drop_items)


@given(st.integers(1, 60), LENGTHS)
def test_dropping_one_is_the_plain_cut(max_items: int, length: int) -> None:
    items = list(range(length))
    assert HistoryWindow(max_items, 1).cut(items) == items[-max_items:]


def test_the_usual_window_drops_a_quarter() -> None:
    assert HistoryWindow.of(256) == HistoryWindow(256, 64)
    assert HistoryWindow.of(3) == HistoryWindow(3, 1)


@pytest.mark.parametrize(("max_items", "drop_items"), [(0, 1), (4, 0), (-1, -1), (4, 5), (True, 1), (4.0, 1), ("4", 1)])
def test_windows_that_cannot_be(max_items: Any, drop_items: Any) -> None:
    with pytest.raises(InvalidSettingError):
        HistoryWindow(max_items, drop_items)


@pytest.mark.parametrize("max_items", [0, -4, 2.0, None])
def test_usual_windows_that_cannot_be(max_items: Any) -> None:
    with pytest.raises(InvalidSettingError):
        HistoryWindow.of(max_items)
