"""Logs as histories with labels, and the cases of the evaluation that are made of them."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.support import logs
from userkv.core.errors import InvalidInputFileError, InvalidSettingError
from userkv.ranking.history_window import HistoryWindow
from userkv.train.evaluate import (
    VALIDATION,
    Case,
    evaluate,
    item_counts,
    leave_out,
    popularity,
)
from userkv.train.interactions import Interactions, UserHistory, read_interactions


def test_ratings_in_order_of_time(tmp_path: Path) -> None:
    found = read_interactions(logs.ratings(tmp_path / "ratings.csv"))
    assert (found.source, found.tasks, len(found.users), found.num_events) == ("ratings", ("watch", "like"), 80, 960)
    assert found.catalogue.tolist() == list(range(100, 140))
    for user in found.users:
        items = found.catalogue[user.items]
        assert len(set(items.tolist())) == 12
        assert user.labels.tolist() == [[1.0, float(item % 2 == 0)] for item in items]
    # One round trip: what follows an item is the same for everybody.
    follows = {(int(a), int(b)) for user in found.users for a, b in zip(user.items, user.items[1:], strict=False)}
    assert len(follows) == 40


def test_a_directory_and_a_compressed_file(tmp_path: Path) -> None:
    plain = logs.ratings(tmp_path / "ratings.csv")
    packed = tmp_path / "other.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_interactions(tmp_path).num_events == read_interactions(packed).num_events == 960


def test_the_order_of_the_file_tells_nothing(tmp_path: Path) -> None:
    rows = [f"{user},{item},4,{item // 10}" for user in range(6) for item in range(30)]
    for name, lines in (("a", rows), ("b", rows[::-1])):
        (tmp_path / name).write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")
    one, other = (read_interactions(tmp_path / name) for name in "ab")
    by_user = {user.user: user.items.tolist() for user in other.users}
    assert all(user.items.tolist() == by_user[user.user] for user in one.users)
    # Ten films of one second each: they stay together, but by no number, and for every user differently.
    assert all({item // 10 for item in user.items[:10].tolist()} == {0} for user in one.users)
    assert len({tuple(user.items.tolist()) for user in one.users}) == 6
    rising = np.mean([np.mean(np.diff(user.items[:10]) > 0) for user in one.users])
    assert 0.2 < rising < 0.8


def test_otto_events_have_types(tmp_path: Path) -> None:
    found = read_interactions(logs.otto(tmp_path / "log"))
    assert found.tasks == ("click", "cart", "order")
    assert found.users[0].labels.tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0]]
    (tmp_path / "bad").write_text('{"session": 1, "events": [{"aid": 1, "ts": 1, "type": "gift"}]}\n')
    with pytest.raises(InvalidInputFileError, match="line 1: event 0: type must be one of clicks, carts, orders"):
        read_interactions(tmp_path / "bad")


def test_kuairand_exposures_without_a_click_are_no_targets(tmp_path: Path) -> None:
    found = read_interactions(logs.kuairand(tmp_path / "log"))
    assert found.tasks == ("click", "like", "long_view")
    assert found.users[0].labels[:, 0].tolist() == [1, 0] * 4
    assert found.users[0].labels[:, 2].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert found.users[0].positives.tolist() == [2, 4, 6]
    case = next(leave_out(found))
    assert (case.history, case.candidates[0]) == ([0, 1, 2, 3, 4, 5], 6)


def test_kuairand_without_labels_has_one_task(tmp_path: Path) -> None:
    rows = [f"{user},{n},{n}" for user in range(6) for n in range(4)]
    (tmp_path / "log").write_text("\n".join(["user_id,video_id,time_ms", *rows]) + "\n")
    found = read_interactions(tmp_path / "log")
    assert found.tasks == ("view",)
    assert found.users[0].labels.tolist() == [[1.0]] * 4


def test_logs_that_cannot_be_used(tmp_path: Path) -> None:
    log = logs.ratings(tmp_path / "ratings.csv", users=4)
    with pytest.raises(InvalidInputFileError, match="has 4 users with at least 3 events to learn from"):
        read_interactions(log)
    with pytest.raises(InvalidInputFileError, match="has 0 users"):
        read_interactions(logs.ratings(tmp_path / "short", events=2))
    with pytest.raises(InvalidInputFileError, match="cannot be read"):
        read_interactions(tmp_path / "nowhere")
    with pytest.raises(InvalidSettingError, match="--format must be one of otto, ratings, kuairand, not 'csv'"):
        read_interactions(log, "csv")
    (tmp_path / "w").write_text('{"userkv_workload": 1}\n')
    with pytest.raises(InvalidInputFileError, match="is a workload file"):
        read_interactions(tmp_path / "w")
    good = logs.ratings(log).read_text()
    log.write_text(good + "torn\n")
    with pytest.raises(InvalidInputFileError, match="line 962: 1 fields"):
        read_interactions(log)
    assert read_interactions(log, skip_bad=True).skipped == 1


def history(user: str, *items: int) -> UserHistory:
    return UserHistory(user, np.array(items), np.ones((len(items), 1), np.float32))


LOG = Interactions(
    np.array([10, 20, 30, 40, 50, 60]),
    ("click",),
    [history("a", 0, 1, 2, 3), history("b", 1, 0), history("c", 4, 0, 4, 0, 1)],
    "ratings",
)


def test_cases_leave_the_last_item_out() -> None:
    assert list(leave_out(LOG)) == [
        Case("a", [10, 20, 30], [40, 50, 60]),
        Case("c", [50, 10, 50, 10], [20, 30, 40, 60]),
    ]
    # An item that the user knows may be the target all the same.
    assert list(leave_out(LOG, HistoryWindow(2, 2), target=VALIDATION)) == [
        Case("a", [10, 20], [30, 40, 50, 60]),
        Case("c", [50], [10, 20, 30, 40, 60]),
    ]


def test_drawn_candidates_are_drawn_equally() -> None:
    cases = list(leave_out(LOG, negatives=2, seed=5))
    assert cases == list(leave_out(LOG, negatives=2, seed=5))
    for case, full in zip(cases, leave_out(LOG), strict=True):
        assert (case.candidates[0], len(case.candidates)) == (full.candidates[0], 3)
        assert set(case.candidates) <= set(full.candidates)
    assert len({tuple(next(leave_out(LOG, negatives=1, seed=seed)).candidates) for seed in range(20)}) == 2


def test_popularity_counts_what_was_before_the_targets() -> None:
    assert item_counts(LOG, target=1).tolist() == [4, 2, 1, 0, 2, 0]
    assert item_counts(LOG, target=VALIDATION).tolist() == [3, 2, 0, 0, 2, 0]
    assert popularity(LOG)([], [10, 60, 20]) == [4.0, 0.0, 2.0]


def test_metrics() -> None:
    def case(others: int) -> Case:
        return Case("u", [], list(range(others + 1)))

    scores = {21: [5.0] + [9.0] * 2 + [5.0] * 2 + [1.0] * 16, 41: [5.0] + [9.0] * 10 + [1.0] * 30, 2: [1.0, 0.0]}
    found = evaluate([case(20), case(40), case(1)], lambda _, candidates: scores[len(candidates)])
    assert found.ranks == [4.0, 11.0, 1.0]
    assert found.hr == pytest.approx(2 / 3)
    assert found.ndcg == pytest.approx((1 / np.log2(5) + 1) / 3)
    assert found.auc == pytest.approx((1 - 3 / 20 + 1 - 10 / 40 + 1) / 3)
    assert found.as_json() == {"hr": found.hr, "ndcg": found.ndcg, "auc": found.auc, "users": 3}


@pytest.mark.parametrize("scores", [[1.0], [1.0, float("nan")], [[1.0, 2.0]]])
def test_a_ranker_that_does_not_answer(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="user u: 2 candidates"):
        evaluate([Case("u", [], [1, 2])], lambda history, candidates: scores)
