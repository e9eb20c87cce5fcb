"""Saves from start to end, case by case; ``test_saves_model.py`` puts them together."""

import pytest

from tests.support.fake_pool_client import COMMIT_UNANSWERED, COMMITTED, REFUSED
from tests.support.records import BLOCK, answer_of, record_of
from tests.support.saves_bench import SavesBench
from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, NOT_IN_POOL, PoolCommitResult
from userkv.records.record import UserRecord


@pytest.mark.parametrize("asked", [True, False])
def test_a_save_that_works(asked: bool) -> None:
    bench = SavesBench()
    save = bench.begin(10, NOT_IN_POOL if asked else None)
    assert bench.saves.is_saving("u", "n")
    assert bench.saves.has_unshipped()
    bench.forget()
    if not asked:
        assert bench.saves.ship() == []
        (lookup,) = bench.pool.lookups
        assert (lookup.uid, lookup.namespace) == ("u", "n")
        lookup.answer(NOT_IN_POOL)
    job = bench.ship()
    assert (job.job_id, job.uid, job.namespace, job.during_forward) == (save.job_id, "u", "n", False)
    assert [(extent.first_block, ids) for extent, ids in job.extents] == [(0, (100, 101)), (2, (102,))]
    assert job.live_block == 102
    assert not bench.saves.has_unshipped()
    bench.report(save, True)
    assert bench.pool.commits == []
    bench.report(save, True)
    (commit,) = bench.pool.commits
    assert (commit.uid, commit.namespace, commit.base_generation) == ("u", "n", 0)
    assert commit.record.tokens.tolist() == list(range(10))
    assert commit.record.extents == tuple(extent for extent, _ in job.extents)
    assert commit.record.writer == "writer"
    assert commit.record.expires_at == 0
    assert bench.blocks.num_free == 57
    commit.answer(COMMITTED)
    assert not bench.saves.is_saving("u", "n")
    assert bench.saves.take_counts() == {"committed_saves": 1}
    assert bench.pool.removed == []
    bench.assert_over(True)


def test_only_what_is_new_is_held_and_written() -> None:
    bench = SavesBench()
    base = record_of(range(16), generation=8)
    save = bench.begin(23, answer_of(base))
    bench.forget()
    job = bench.ship()
    assert [(extent.first_block, ids) for extent, ids in job.extents] == [(4, (104, 105))]
    assert [block.block_id for block in bench.saves.held_blocks()] == [104, 105]
    assert bench.blocks.num_free == 58
    bench.report(save, True, True)
    (commit,) = bench.pool.commits
    assert commit.base_generation == 8
    assert commit.record.extents == (*base.extents, job.extents[0][0])
    commit.answer(COMMITTED)
    bench.assert_over(True)


def test_what_the_pool_has_lost_is_written_again() -> None:
    bench = SavesBench()
    base = record_of(range(16), generation=8)
    save = bench.begin(16, answer_of(base, [True, False]))
    job = bench.ship()
    assert [extent.first_block for extent, _ in job.extents] == [2]
    assert job.live_block == -1
    bench.report(save, True, True)
    assert bench.pool.commits[0].base_generation == 8
    bench.pool.commits[0].answer(PoolCommitResult(True, garbage=base.extents[1:]))
    assert bench.pool.removed == [base.extents[1]]
    bench.assert_over(True)


@pytest.mark.parametrize("record", [None, UserRecord.tombstone(5, "w", 1.0)])
def test_a_user_who_is_new_or_was_deleted_is_written_whole(record: UserRecord | None) -> None:
    bench = SavesBench()
    save = bench.begin(10, answer_of(record))
    assert len(bench.ship().extents) == 2
    bench.report(save, True, True)
    assert bench.pool.commits[0].base_generation == (0 if record is None else 5)
    bench.pool.commits[0].answer(COMMITTED)
    bench.assert_over(True)


def test_what_the_pool_has_already_is_not_written() -> None:
    bench = SavesBench()
    bench.begin(10, answer_of(record_of(range(12))))
    assert bench.saves.ship() == []
    assert bench.saves.take_counts() == {"unneeded_saves": 1}
    bench.assert_over(True)


def test_a_pool_that_does_not_answer_costs_the_save() -> None:
    bench = SavesBench()
    bench.begin(10, LOOKUP_FAILED)
    bench.pool.lookups[0].answer(LOOKUP_FAILED)
    assert bench.saves.ship() == []
    assert bench.saves.take_counts() == {"failed_saves": 1}
    bench.assert_over(False)


@pytest.mark.parametrize("oks", [(False, True), (True, False), (False, False)])
def test_one_rank_that_fails_is_enough(oks: tuple[bool, ...]) -> None:
    bench = SavesBench()
    save = bench.begin()
    extents = [extent for extent, _ in bench.ship().extents]
    bench.report(save, oks[0])
    assert bench.pool.removed == []  # The other rank still writes.
    bench.report(save, oks[1])
    assert bench.pool.commits == []
    assert bench.pool.removed == extents
    assert bench.saves.take_counts() == {"failed_saves": 1}
    bench.assert_over(False)


@pytest.mark.parametrize("dropped", [(True, False), (False, True), (True, True)])
def test_a_save_that_ranks_had_no_time_for_is_counted_once(dropped: tuple[bool, ...]) -> None:
    bench = SavesBench()
    save = bench.begin()
    extents = [extent for extent, _ in bench.ship().extents]
    for each in dropped:
        bench.report(save, not each, dropped=each)
    assert bench.pool.removed == extents
    assert bench.saves.take_counts() == {"dropped_saves": 1}
    bench.assert_over(False)


def test_counts_are_taken_once() -> None:
    bench = SavesBench()
    bench.begin(10, answer_of(record_of(range(12))))
    assert bench.saves.take_counts() == {"unneeded_saves": 1}
    assert bench.saves.take_counts() == {}
    bench.assert_over(True)


def test_a_refused_commit_leaves_nothing_behind() -> None:
    bench = SavesBench()
    save = bench.begin()
    extents = [extent for extent, _ in bench.ship().extents]
    bench.report(save, True, True)
    bench.pool.commits[0].answer(REFUSED)
    assert bench.pool.removed == extents
    bench.assert_over(False)


def test_a_commit_without_an_answer_may_have_happened() -> None:
    bench = SavesBench()
    save = bench.begin()
    bench.ship()
    bench.report(save, True, True)
    bench.pool.commits[0].answer(COMMIT_UNANSWERED)
    assert bench.pool.removed == []
    bench.assert_over(False)


def test_one_save_of_a_user_at_a_time_and_a_limit_for_all() -> None:
    bench = SavesBench(max_saves=2)
    first = bench.begin()
    assert bench.saves.start(bench.history([1, 2]), None) is None
    assert bench.saves.take_counts() == {}
    assert bench.saves.start(bench.history([1, 2], namespace="m"), None) is not None
    assert bench.saves.start(bench.history([1, 2], user="v"), None) is None
    assert bench.saves.take_counts() == {"dropped_saves": 1}
    assert not bench.saves.is_saving("v", "n")
    assert len(bench.saves) == 2
    bench.pool.lookups[0].answer(LOOKUP_FAILED)
    last = bench.saves.start(bench.history([1, 2], user="v"), NOT_IN_POOL)
    assert last is not None
    assert [job.job_id for job in bench.saves.ship()] == [first.job_id, last.job_id]
    bench.report(first, False, False)
    bench.report(last, False, False)
    bench.assert_over(False, False, False)


def test_during_the_forward_pass_the_last_block_is_live_and_the_commit_waits() -> None:
    bench = SavesBench()
    save = bench.begin(8, NOT_IN_POOL, during_forward=True)
    job = bench.ship()
    assert job.during_forward
    assert job.live_block == 101
    bench.report(save, True, True)
    assert bench.pool.commits == []
    bench.saves.confirm(save)
    bench.saves.confirm(save)
    (commit,) = bench.pool.commits
    commit.answer(COMMITTED)
    bench.saves.cancel(save)
    bench.assert_over(True)


def test_a_save_that_is_cancelled_in_time_is_not_even_written() -> None:
    bench = SavesBench()
    save = bench.begin(during_forward=True)
    bench.saves.cancel(save)
    assert bench.saves.ship() == []
    bench.assert_over(False)


@pytest.mark.parametrize("when", ["before the ranks", "between the ranks", "after the ranks"])
def test_a_cancelled_save_is_never_committed(when: str) -> None:
    bench = SavesBench()
    save = bench.begin(during_forward=True)
    extents = [extent for extent, _ in bench.ship().extents]
    for step in ("before the ranks", "between the ranks"):
        if when == step:
            bench.saves.cancel(save)
        assert bench.pool.removed == []
        bench.report(save, True)
    bench.saves.cancel(save)
    bench.saves.confirm(save)
    assert bench.pool.commits == []
    assert bench.pool.removed == extents
    bench.assert_over(False)


def test_an_unneeded_save_may_be_confirmed_or_cancelled() -> None:
    for decide in ("confirm", "cancel"):
        bench = SavesBench()
        save = bench.begin(10, answer_of(record_of(range(10))), during_forward=True)
        getattr(bench.saves, decide)(save)
        bench.assert_over(True)


def test_reports_of_jobs_that_are_over_are_ignored() -> None:
    bench = SavesBench()
    save = bench.begin()
    bench.ship()
    bench.report(save, True, True, True, False)
    bench.saves.report_write(999, True)
    bench.pool.commits[0].answer(COMMITTED)
    bench.report(save, True)
    assert len(bench.pool.commits) == 1
    bench.assert_over(True)


def test_records_expire_when_they_should() -> None:
    bench = SavesBench(ttl_seconds=60)
    save = bench.begin()
    bench.ship()
    bench.report(save, True, True)
    record = bench.pool.commits[0].record
    assert record.expires_at == record.written_at + 60
    bench.pool.commits[0].answer(COMMITTED)
    bench.assert_over(True)


def test_blocks_are_let_go_on_the_schedulers_thread_only() -> None:
    """The block pool is not thread-safe: however a save ends, its blocks wait for ``release``."""
    bench = SavesBench()
    save = bench.begin()
    bench.ship()
    bench.forget()
    bench.report(save, True, True)
    bench.pool.commits[0].answer(COMMITTED)
    assert bench.blocks.num_free == 57
    assert len(bench.saves.held_blocks()) == 3
    assert bench.saves.frees_blocks_soon()
    bench.saves.release()
    assert not bench.saves.frees_blocks_soon()
    assert bench.blocks.num_free == 60


def test_saves_do_not_take_all_of_hbm() -> None:
    """A slow pool must leave blocks to the requests; but a single history may be as long as it is."""
    bench = SavesBench(max_held_blocks=6)
    long, short = bench.history(list(range(BLOCK * 8))), bench.history([1] * BLOCK, "v")
    first = bench.saves.start(long, None)
    assert first is not None
    assert bench.saves.start(short, None) is None
    assert bench.saves.take_counts() == {"dropped_saves": 1}


@pytest.mark.parametrize("reports", [0, 1, 2])
@pytest.mark.parametrize("during_forward", [False, True])
def test_what_is_given_up_ends_without_a_commit(reports: int, during_forward: bool) -> None:
    bench = SavesBench()
    save = bench.begin(during_forward=during_forward)
    extents = [extent for extent, _ in bench.ship().extents]
    bench.report(save, *[True] * reports)
    bench.saves.cancel_all()
    assert bench.saves.held_blocks() == []
    bench.report(save, *[True] * (2 - reports))
    if reports == 2 and not during_forward:
        bench.pool.commits.pop().answer(COMMITTED)  # All that it names was written before.
        assert bench.pool.removed == []
        bench.assert_over(True)
    else:
        assert bench.pool.commits == []
        assert bench.pool.removed == extents
        bench.assert_over(False)


def test_new_weights_give_all_blocks_back_at_once() -> None:
    bench = SavesBench(max_saves=9)
    asked = bench.saves.start(bench.history([1] * BLOCK, "asked"), None)
    ready = bench.saves.start(bench.history([1] * BLOCK, "ready"), NOT_IN_POOL)
    assert asked is not None
    assert ready is not None
    bench.saves.cancel_all()
    assert bench.saves.held_blocks() == []
    assert bench.saves.ship() == []
    bench.pool.lookups[-1].answer(NOT_IN_POOL)
    assert len(bench.saves) == 0
    assert [ok for _, ok in bench.ended] == [False, False]
