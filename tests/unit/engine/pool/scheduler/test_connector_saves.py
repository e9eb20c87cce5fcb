"""What the connector saves, and when. Every test ends with all blocks free."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_pool_client import COMMITTED, REFUSED
from tests.support.records import answer_of, record_of
from tests.support.scheduler_bench import FULL, HISTORY, SchedulerBench, drain
from userkv.core.request import UserKey
from userkv.engine.pool.metrics import COUNTERS
from userkv.engine.pool.scheduler.history_saver import RECHECK_SECONDS, RETRY_SECONDS
from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, NOT_IN_POOL
from userkv.store.backend import Tier


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[SchedulerBench]:
    options: dict[str, Any] = getattr(request, "param", {})
    bench = SchedulerBench(**options)
    yield bench
    bench.assert_nothing_is_held()


class TestSaving:
    """From a history in HBM to a record."""

    def test_a_new_history_is_saved_with_the_answer_at_hand(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        assert bench.pool.lookups == []
        (job,) = bench.jobs.saves
        assert (job.uid, job.namespace, job.during_forward) == ("u", "n1", False)
        bench.write()
        assert bench.pool.commits[0].record.tokens.tolist() == HISTORY
        bench.save()
        assert bench.scheduler.take_stats().reduce() == {"pool_lookups_miss": 1, "committed_saves": 1}

    def test_blocks_stay_until_they_are_written(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.evict()
        assert bench.blocks.num_free == 94
        assert {b for _, ids in bench.jobs.saves[0].extents for b in ids} == {
            block.block_id for block in bench.blocks.blocks if block.ref_cnt
        }
        bench.save()
        assert bench.blocks.num_free == 100

    def test_a_step_is_needed_while_a_save_waits_for_one(self, bench: SchedulerBench) -> None:
        assert not bench.scheduler.needs_step()
        bench.arrive("1", HISTORY, read=False)
        bench.find("1")
        bench.start("1", 0)
        bench.finish("1")
        bench.step()
        assert bench.scheduler.needs_step()
        bench.asked().answer(NOT_IN_POOL)
        assert bench.scheduler.needs_step()
        bench.step()
        assert not bench.scheduler.needs_step()
        bench.save()

    def test_an_answer_from_before_the_last_save_says_nothing(self, bench: SchedulerBench) -> None:
        for name in ("1", "2"):
            bench.arrive(name, HISTORY[: 10 * int(name)])
        for lookup in bench.pool.lookups:
            lookup.answer(NOT_IN_POOL)
        bench.pool.lookups.clear()
        bench.clock.now += 1
        bench.find("1")
        bench.start("1", 0)
        bench.finish("1")
        bench.step()
        bench.save()
        bench.clock.now += 1
        bench.find("2")
        bench.start("2", 0)
        bench.finish("2")
        bench.asked().answer(answer_of(record_of(HISTORY[:10], 7)))
        (job,) = bench.step().saves
        assert [extent.first_block for extent, _ in job.extents] == [2, 4]
        bench.write()
        assert bench.pool.commits[0].base_generation == 7
        bench.save()

    def test_a_history_that_grows_while_it_is_saved(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY[:10], answer=NOT_IN_POOL)
        first = bench.jobs
        bench.run("2", HISTORY[:15], answer=NOT_IN_POOL)
        bench.run("3", HISTORY[:20], answer=NOT_IN_POOL)
        assert bench.jobs.saves == []
        assert bench.scheduler.needs_step()
        bench.write(*first.saves)
        bench.pool.commits.pop().answer(COMMITTED)
        bench.step()
        bench.asked().answer(answer_of(record_of(HISTORY[:10], 7)))
        (job,) = bench.step().saves
        bench.write()
        assert bench.pool.commits[0].record.tokens.tolist() == HISTORY[:20]
        bench.save()
        assert job.extents

    def test_what_has_left_hbm_while_it_waited_is_not_saved(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY[:10], answer=NOT_IN_POOL)
        first = bench.jobs
        bench.run("2", HISTORY, answer=NOT_IN_POOL)
        bench.evict()
        bench.write(*first.saves)
        bench.save()
        bench.step()
        assert bench.pool.lookups == []
        assert not bench.scheduler.needs_step()

    def test_a_user_who_only_hits_hbm_is_checked_now_and_then(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.save()
        start = bench.clock.now
        for name, after, asked in [("2", 1, False), ("3", RECHECK_SECONDS - 1, False), ("4", RECHECK_SECONDS, True)]:
            bench.clock.now = start + after
            bench.run(name, HISTORY)
            assert bool(bench.pool.lookups) == asked
        # The pool has forgotten him.
        bench.asked().answer(NOT_IN_POOL)
        assert len(bench.step().saves) == 1
        bench.save()
        bench.clock.now += RECHECK_SECONDS - 1
        bench.run("5", HISTORY)
        assert bench.pool.lookups == []

    def test_a_user_who_was_in_hbm_before_is_checked_at_once(self, bench: SchedulerBench) -> None:
        """His save may have been dropped; nobody knows of one."""
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.save()
        bench.run("2", HISTORY[:3], user="v", answer=LOOKUP_FAILED)
        drain(bench)
        bench.clock.now += RETRY_SECONDS
        bench.run("3", HISTORY[:3], user="v")
        bench.asked().answer(NOT_IN_POOL)
        assert [job.uid for job in bench.step().saves] == ["v"]
        bench.save()

    def test_a_user_whose_entry_has_changed_is_checked_at_once(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.save()
        bench.users.table.acquire(UserKey("u"))
        bench.users.table.shorten(UserKey("u"), 8)  # Somebody needed the room.
        bench.users.table.release(UserKey("u"))
        bench.run("2", HISTORY[:8])
        bench.asked().answer(FULL)
        assert bench.step().saves == []

    @pytest.mark.parametrize("failure", ["a rank", "the commit", "the look-up"])
    def test_a_save_that_failed_is_tried_again(self, bench: SchedulerBench, failure: str) -> None:
        bench.run("1", HISTORY, answer=LOOKUP_FAILED if failure == "the look-up" else NOT_IN_POOL)
        if failure == "a rank":
            bench.write(ok=False)
        elif failure == "the commit":
            bench.write()
            bench.pool.commits.pop().answer(REFUSED)
        else:
            bench.asked().answer(LOOKUP_FAILED)
        bench.step()
        bench.clock.now += RETRY_SECONDS - 0.1
        bench.run("2", HISTORY)
        assert bench.pool.lookups == []
        bench.clock.now += 0.2
        bench.run("3", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        assert len(bench.step().saves) == 1
        bench.save()
        assert bench.scheduler.take_stats().reduce()["committed_saves"] == 1

    def test_a_user_who_hits_hbm_only_in_part_is_not_checked(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.save()
        bench.clock.now += 2 * RECHECK_SECONDS
        bench.arrive("2", [*HISTORY, 50])
        bench.asked().answer(FULL)
        bench.start("2", bench.find("2") or 0)
        assert bench.pool.lookups == []
        bench.finish("2", computed=0)

    def test_what_the_pool_has_already_is_not_saved_and_not_held(self, bench: SchedulerBench) -> None:
        assert bench.run("1", HISTORY, answer=FULL) == len(HISTORY)
        assert len(bench.saves or ()) == 0
        assert bench.jobs.saves == []
        assert bench.scheduler.take_stats().reduce()["unneeded_saves"] == 1
        bench.clock.now += RECHECK_SECONDS - 1
        bench.run("2", HISTORY)
        assert bench.pool.lookups == []
        bench.clock.now += 2
        bench.run("3", HISTORY)
        bench.asked().answer(FULL)

    def test_what_expires_while_it_is_loaded_is_saved_again(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=answer_of(record_of(HISTORY, expires_at=2.0)))
        assert len(bench.jobs.saves) == 1
        bench.save()

    def test_another_history_that_is_being_saved_does_not_stay(self, bench: SchedulerBench) -> None:
        """It replaces what the pool had of this one when it was asked."""
        other = [99, *HISTORY[1:]]
        for name, history in (("1", other), ("2", HISTORY)):
            bench.arrive(name, history)
            bench.asked().answer(FULL)
        for name in ("1", "2"):
            bench.start(name, bench.find(name) or 0)
            bench.scheduler.report_loads({job.job_id: (1, True) for job in bench.jobs.loads})
            bench.finish(name)
        bench.write()  # Of the other history, which the step of the second request has shipped.
        bench.pool.commits.pop().answer(COMMITTED)
        bench.step()
        bench.asked().answer(answer_of(record_of(other, generation=6)))
        assert len(bench.step().saves) == 1
        bench.save()

    def test_a_step_in_which_nothing_happens_has_no_figures(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.save()
        assert bench.scheduler.take_stats() is not None
        assert bench.scheduler.take_stats() is None

    def test_all_counts_have_a_metric(self, bench: SchedulerBench) -> None:
        seen: set[str] = set()
        for user, answer in enumerate([NOT_IN_POOL, LOOKUP_FAILED, FULL, answer_of(record_of(HISTORY), tier=Tier.SSD)]):
            bench.run(str(user), HISTORY, user=str(user), answer=answer)
            drain(bench)
            bench.evict()
            seen |= bench.scheduler.take_stats().reduce().keys()
        for user in "abcdefghijk":
            bench.run(user, HISTORY[:4], user=user, answer=NOT_IN_POOL)
            bench.write(ok=user != "a")
        bench.save()
        seen |= bench.scheduler.take_stats().reduce().keys()
        assert seen <= COUNTERS.keys()
        assert {"dropped_saves", "pool_lookups_ssd", "pool_lookups_failed", "unneeded_saves"} <= seen


class TestNewWeights:
    """``on_cache_reset``: KV of old and new weights never meet."""

    def test_who_waits_asks_under_the_new_name(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        old = bench.asked()
        bench.clock.now += 0.1
        bench.users.reset()
        assert bench.find("1") is None
        new = bench.asked()
        assert new.namespace == "n2"
        old.answer(FULL)
        assert bench.find("1") is None
        new.answer(NOT_IN_POOL)
        assert bench.find("1") == 0
        bench.scheduler.finish_request("1")

    def test_an_answer_from_before_is_forgotten(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.clock.now += 0.1
        bench.users.reset()
        assert bench.find("1") is None
        assert bench.asked().namespace == "n2"
        bench.scheduler.finish_request("1")

    def test_what_runs_is_not_saved(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        bench.find("1")
        bench.start("1", 0)
        bench.users.reset()
        bench.finish("1")
        assert bench.step().saves == []
        assert bench.pool.lookups == []

    def test_saves_under_way_are_given_up(self, bench: SchedulerBench) -> None:
        """vLLM's own cache is reset only if nobody holds a block."""
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        shipped = bench.jobs.saves
        bench.arrive("2", HISTORY, user="v", read=False)
        bench.find("2")
        bench.start("2", 0)
        bench.finish("2")
        bench.users.reset()
        assert bench.blocks.num_free == 100
        bench.asked().answer(NOT_IN_POOL)
        bench.write(*shipped)
        bench.step()
        assert bench.pool.commits == bench.jobs.saves == []

    def test_a_commit_under_way_keeps_its_name(self, bench: SchedulerBench) -> None:
        """What it names was written before."""
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.write()
        bench.users.reset()
        (commit,) = bench.pool.commits
        assert commit.namespace == "n1"
        bench.save()

    def test_what_waited_for_a_save_is_forgotten(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY[:10], answer=NOT_IN_POOL)
        first = bench.jobs
        bench.run("2", HISTORY, answer=NOT_IN_POOL)
        assert bench.scheduler.needs_step()
        bench.users.reset()
        assert not bench.scheduler.needs_step()
        bench.write(*first.saves)
        bench.step()
        assert bench.pool.lookups == bench.pool.commits == []

    def test_a_save_of_old_weights_that_ends_late(self, bench: SchedulerBench) -> None:
        """It is not what the user's next history waits for."""
        bench.run("1", HISTORY[:6], answer=NOT_IN_POOL)
        old = bench.jobs
        bench.clock.now += 0.1
        bench.users.reset()
        bench.run("2", HISTORY[:10], answer=NOT_IN_POOL)
        new = bench.jobs
        assert [job.namespace for job in new.saves] == ["n2"]
        bench.run("3", HISTORY, answer=NOT_IN_POOL)
        bench.write(*old.saves)
        bench.step()
        assert bench.pool.lookups == []
        bench.write(*new.saves)
        bench.pool.commits.pop().answer(COMMITTED)
        bench.step()
        bench.asked().answer(answer_of(record_of(HISTORY[:10], 7)))
        (job,) = bench.step().saves
        assert job.namespace == "n2"
        bench.write()
        assert bench.pool.commits[0].record.tokens.tolist() == HISTORY
        bench.save()

    def test_a_request_that_ran_never_meets_the_pool_again(self, bench: SchedulerBench) -> None:
        """It may have KV of both weights."""
        bench.arrive("1", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        bench.find("1")
        bench.start("1", 0)
        bench.clock.now += 0.1
        bench.users.reset()
        assert bench.scheduler.find_loadable("1", 30, 0) == 0
        assert bench.pool.lookups == []
        bench.finish("1")

    def test_users_are_saved_again(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=NOT_IN_POOL)
        bench.save()
        bench.clock.now += 0.1
        bench.users.reset()
        bench.run("2", HISTORY, answer=NOT_IN_POOL)
        assert [job.namespace for job in bench.jobs.saves] == ["n2"]
        bench.save()
