"""What the scheduler's half asks, loads and saves, and when. Every test ends with all blocks free."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agreed import COMMITTED, REFUSED
from tests.support.records import answer_of, record_of
from tests.support.scheduler_bench import CANDIDATES, SchedulerBench
from userkv.core.record import UserRecord
from userkv.core.request import UserKey
from userkv.engine.pool import scheduler_half
from userkv.engine.pool.agreement import ABSENT, UNKNOWN, PoolAnswer
from userkv.engine.pool.keeper import RECHECK_SECONDS, RETRY_SECONDS
from userkv.engine.pool.scheduler_half import ANSWER_SECONDS, BAD_SECONDS
from userkv.engine.pool.stats import COUNTERS
from userkv.store.backend import Tier

HISTORY = list(range(22))
"""Five blocks and a half."""

FULL = answer_of(record_of(HISTORY, generation=5))


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[SchedulerBench]:
    options: dict[str, Any] = getattr(request, "param", {})
    bench = SchedulerBench(**options)
    yield bench
    bench.assert_nothing_is_held()


def drain(bench: SchedulerBench) -> None:
    """Let all saves end."""
    for _ in range(3):
        bench.save(ok=False)
        for lookup in bench.pool.lookups:
            lookup.answer(UNKNOWN)
        bench.pool.lookups.clear()
        bench.step()


class TestAsking:
    """When the pool is asked, and what its answer is worth."""

    def test_a_new_user(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        lookup = bench.asked()
        assert (lookup.uid, lookup.namespace) == ("u", "n1")
        assert bench.find("1") is None
        assert bench.find("1") is None
        assert bench.pool.lookups == []
        lookup.answer(ABSENT)
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1", computed=0)
        assert bench.half.take_stats().reduce() == {"pool_lookups_miss": 1}

    def test_nobody_asks_for_what_is_in_hbm(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=FULL)
        bench.step()
        bench.arrive("2", HISTORY)
        bench.arrive("3", HISTORY[:9])
        assert bench.pool.lookups == []
        assert bench.find("2") == bench.find("3") == 0
        assert bench.pool.lookups == []

    def test_hbm_has_less_than_the_pool(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY[:10], answer=answer_of(record_of(HISTORY[:10])))
        bench.arrive("2", HISTORY)
        bench.asked().answer(FULL)
        assert bench.find("2") == 22 - 8  # Behind the blocks that are full in HBM.
        bench.start("2", 14)
        (job,) = bench.jobs.loads
        ids = [block.block_id for block in bench.requests["2"].blocks]
        assert job.block_ids == tuple(ids[2:6])
        assert [(read.extent.first_block, read.wanted) for read in job.reads] == [(2, (0, 1)), (4, (2, 3))]
        bench.half.loaded({job.job_id: (1, True)})
        bench.finish("2")
        bench.step()
        bench.evict()

    def test_the_pool_has_no_more_than_hbm(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY[:10], answer=answer_of(record_of(HISTORY[:10])))
        bench.arrive("2", HISTORY)
        bench.asked().answer(answer_of(record_of(HISTORY[:10])))
        assert bench.find("2") == 0
        bench.start("2", 0)
        bench.finish("2", computed=0)

    def test_the_pool_has_another_history(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(answer_of(record_of([*HISTORY[:7], 99, *HISTORY[8:]])))
        assert bench.find("1") == 7
        bench.start("1", 7)
        assert [read.wanted for read in bench.jobs.loads[0].reads] == [(0, 1)]
        bench.half.loaded({bench.jobs.loads[0].job_id: (1, True)})
        bench.finish("1", computed=0)

    def test_the_engine_computes_one_token_itself(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.requests["1"].num_tokens = len(HISTORY)  # A request without candidates.
        bench.asked().answer(FULL)
        assert bench.find("1") == 21
        bench.requests.clear()
        bench.half.finished("1")

    @pytest.mark.parametrize("answer", [UNKNOWN, answer_of(UserRecord.tombstone(3, "w", 1.0))])
    def test_nothing_to_load(self, bench: SchedulerBench, answer: PoolAnswer) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(answer)
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1", computed=0)
        found = "miss" if answer.known else "failed"
        assert bench.half.take_stats().reduce() == {f"pool_lookups_{found}": 1}

    def test_what_is_left_of_a_damaged_record(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(answer_of(record_of(HISTORY), [True, False, True]))
        assert bench.find("1") == 8
        bench.half.finished("1")

    def test_a_stale_answer_is_asked_for_again(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        first = bench.asked()
        first.answer(FULL)
        bench.clock.now += ANSWER_SECONDS
        assert bench.find("1") == 22
        bench.clock.now += 0.1
        assert bench.find("1") is None
        second = bench.asked()
        first.answer(FULL)  # Too late: it is not believed any more.
        assert bench.find("1") is None
        second.answer(ABSENT)
        assert bench.find("1") == 0
        bench.half.finished("1")

    def test_a_question_without_an_answer_is_not_stale(self, bench: SchedulerBench) -> None:
        """It has a time-out of its own; asking again and again would never end."""
        bench.arrive("1", HISTORY)
        bench.clock.now += 10 * ANSWER_SECONDS
        assert bench.find("1") is None
        assert len(bench.pool.lookups) == 1
        bench.half.finished("1")

    def test_an_answer_is_asked_for_again_once(self, bench: SchedulerBench) -> None:
        """Where steps take longer than answers are trusted, a request would ask for ever."""
        bench.arrive("1", HISTORY)
        for _ in range(2):
            bench.asked().answer(FULL)
            bench.clock.now += 2 * ANSWER_SECONDS
            found = bench.find("1")
        assert found == 22
        assert bench.pool.lookups == []
        bench.half.finished("1")

    def test_a_request_counts_once(self, bench: SchedulerBench) -> None:
        """It may be preempted, and get blocks again."""
        bench.arrive("1", HISTORY)
        bench.asked().answer(ABSENT)
        bench.find("1")
        bench.start("1", 0)
        bench.half.allocated("1", [1, 2, 3], 0)
        assert bench.half.take_stats().reduce() == {"pool_lookups_miss": 1}
        bench.finish("1", computed=0)

    def test_a_history_that_left_hbm_meanwhile(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=FULL)
        bench.arrive("2", HISTORY)
        bench.evict()
        assert bench.find("2") is None
        bench.asked().answer(FULL)
        assert bench.find("2") == 22
        bench.half.finished("2")

    @pytest.mark.parametrize("bench", [{"loads": False}], indirect=True)
    def test_an_engine_that_only_saves(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        assert bench.find("1") == 0
        assert bench.pool.lookups == []
        bench.start("1", 0)
        bench.finish("1")
        bench.step()
        bench.asked().answer(ABSENT)
        assert len(bench.step().saves) == 1
        bench.save()

    @pytest.mark.parametrize("bench", [{"saves": False}], indirect=True)
    def test_an_engine_that_only_loads(self, bench: SchedulerBench) -> None:
        assert bench.run("1", HISTORY, answer=FULL) == 22
        assert bench.jobs.saves == []
        assert not bench.half.needs_step()
        bench.half.step_computes("1", 0, 30, ())

    def test_a_request_that_does_not_read(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY, read=False)
        assert bench.pool.lookups == []
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1")
        bench.asked().answer(ABSENT)
        assert len(bench.step().saves) == 1
        bench.save()

    def test_a_request_that_does_not_write(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY, write=False)
        bench.asked().answer(ABSENT)
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1")
        assert bench.step().saves == []
        assert len(bench.saves or ()) == 0

    def test_kv_that_cannot_be_named_stays_out_of_the_pool(self, bench: SchedulerBench) -> None:
        bench.namespace = ""
        for name in ("1", "2"):
            bench.arrive(name, HISTORY)
            assert bench.find(name) == 0
            bench.start(name, 0)
            bench.finish(name)
        assert bench.step().saves == []
        assert bench.pool.lookups == []

    def test_requests_that_nobody_announced(self, bench: SchedulerBench) -> None:
        assert bench.half.find("x", 10, 0) == 0
        bench.half.allocated("x", [1, 2], 0)
        bench.half.finished("x")
        assert bench.half.hit_tier("x") is None

    def test_users_with_adapters_and_salts_have_other_names(self, bench: SchedulerBench) -> None:
        lookup = bench.requests
        bench.arrive("1", HISTORY, user="u/x@")
        assert bench.asked().uid == "u%2Fx%40"
        lookup["1"].lookup.key = UserKey("u", "adapter", "/path", "salt")
        bench.half.new_request("2", lookup["1"].lookup, 30)
        assert bench.asked().uid == "u/adapter/%2Fpath/salt"
        bench.half.finished("1")
        bench.half.finished("2")


class TestLoading:
    """From the answer to the KV."""

    def test_a_load_that_works(self, bench: SchedulerBench) -> None:
        assert bench.run("1", HISTORY, answer=answer_of(record_of(HISTORY), tier=Tier.SSD)) == 22
        stats = bench.half.take_stats().reduce()
        assert stats.pop("swapin_tokens_ssd") == 22
        assert stats.pop("unneeded_saves", 0) in (0, 1)
        assert stats == {"pool_lookups_ssd": 1, "swapin_attempts": 1, "swapin_successes": 1}
        drain(bench)

    @pytest.mark.parametrize("bench", [{"ranks": 3}], indirect=True)
    def test_all_ranks_must_have_loaded(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        (job,) = bench.jobs.loads
        bench.half.loaded({job.job_id: (2, True)})
        assert "swapin_successes" not in bench.half.take_stats().reduce()
        bench.half.loaded({job.job_id: (1, True)})
        assert bench.half.take_stats().reduce()["swapin_successes"] == 1
        bench.finish("1", computed=0)

    def test_who_has_loaded_computes_the_rest(self, bench: SchedulerBench) -> None:
        """vLLM asks again when the load is over, and when the request was preempted."""
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        (job,) = bench.jobs.loads
        bench.half.allocated("1", [1] * 10, 22)
        assert bench.step().loads == []
        bench.half.loaded({job.job_id: (1, True)})
        assert bench.half.find("1", 24, 0) == 0
        assert bench.pool.lookups == []
        bench.finish("1", computed=0)

    @pytest.mark.parametrize("bench", [{"ranks": 2}], indirect=True)
    @pytest.mark.parametrize("reports", [[(2, False)], [(1, True), (1, False)], [(1, False), (1, True)]])
    def test_a_load_that_fails(self, bench: SchedulerBench, reports: list[tuple[int, bool]]) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        for report in reports:
            bench.half.loaded({bench.jobs.loads[0].job_id: report})
        assert bench.half.find("1", 24, 0) == 0
        assert bench.pool.lookups == []
        stats = bench.half.take_stats().reduce()
        assert (stats["swapin_attempts"], stats.get("swapin_successes", 0)) == (1, 0)
        assert stats.get("swapin_tokens_dram", 0) == 0
        # The history is computed and kept; what the pool said before is not believed.
        bench.finish("1")
        bench.step()
        bench.asked().answer(answer_of(record_of(HISTORY, generation=5), [True, False, False]))
        (job,) = bench.step().saves
        assert [extent.first_block for extent, _ in job.extents] == [2, 4]
        bench.save()

    def fail(self, bench: SchedulerBench, generation: int) -> None:
        bench.arrive("bad", HISTORY)
        bench.asked().answer(answer_of(record_of(HISTORY, generation)))
        bench.start("bad", bench.find("bad") or 0)
        bench.half.loaded({bench.jobs.loads[0].job_id: (1, False)})
        bench.finish("bad", computed=0)
        bench.step()

    def test_a_record_from_which_a_load_failed_is_left_alone(self, bench: SchedulerBench) -> None:
        self.fail(bench, 5)
        bench.clock.now += BAD_SECONDS - 0.1
        bench.arrive("2", HISTORY)
        bench.asked().answer(FULL)
        assert bench.find("2") == 0
        bench.clock.now += 0.2
        assert bench.find("2") == 22
        bench.half.finished("2")

    def test_its_successor_is_tried_at_once(self, bench: SchedulerBench) -> None:
        self.fail(bench, 5)
        bench.arrive("2", HISTORY)
        bench.asked().answer(answer_of(record_of(HISTORY, 6)))
        assert bench.find("2") == 22
        bench.arrive("other", HISTORY, user="v")
        bench.asked().answer(FULL)
        assert bench.find("other") == 22
        bench.half.finished("2")
        bench.half.finished("other")

    def test_not_every_bad_record_is_remembered_for_ever(
        self, bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scheduler_half, "_MAX_BAD", 2)
        for user in "abc":
            bench.arrive(user, HISTORY, user=user)
            bench.asked().answer(FULL)
            bench.start(user, bench.find(user) or 0)
            bench.half.loaded({bench.jobs.loads[0].job_id: (1, False)})
            bench.finish(user, computed=0)
        for user, found in {"a": 22, "b": 0, "c": 0}.items():
            bench.arrive(user * 2, HISTORY, user=user)
            bench.asked().answer(FULL)
            assert bench.find(user * 2) == found
            bench.half.finished(user * 2)

    def test_the_request_ends_while_it_loads(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        (job,) = bench.jobs.loads
        bench.finish("1", computed=0)
        bench.step()
        bench.half.loaded({job.job_id: (1, False)})
        assert bench.half.hit_tier("1") is None

    def test_where_the_tokens_come_from(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        assert bench.half.hit_tier("1") is None
        bench.asked().answer(answer_of(record_of(HISTORY), tier=Tier.SSD))
        assert bench.half.hit_tier("1") is Tier.SSD
        bench.half.finished("1")


class TestSaving:
    """From a history in HBM to a record."""

    def test_a_new_history_is_saved_with_the_answer_at_hand(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=ABSENT)
        assert bench.pool.lookups == []
        (job,) = bench.jobs.saves
        assert (job.uid, job.namespace, job.during_forward) == ("u", "n1", False)
        bench.write()
        assert bench.pool.commits[0].record.tokens.tolist() == HISTORY
        bench.save()
        assert bench.half.take_stats().reduce() == {"pool_lookups_miss": 1, "committed_saves": 1}

    def test_blocks_stay_until_they_are_written(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=ABSENT)
        bench.evict()
        assert bench.blocks.num_free == 94
        assert {b for _, ids in bench.jobs.saves[0].extents for b in ids} == {
            block.block_id for block in bench.blocks.blocks if block.ref_cnt
        }
        bench.save()
        assert bench.blocks.num_free == 100

    def test_a_step_is_needed_while_a_save_waits_for_one(self, bench: SchedulerBench) -> None:
        assert not bench.half.needs_step()
        bench.arrive("1", HISTORY, read=False)
        bench.find("1")
        bench.start("1", 0)
        bench.finish("1")
        bench.step()
        assert bench.half.needs_step()
        bench.asked().answer(ABSENT)
        assert bench.half.needs_step()
        bench.step()
        assert not bench.half.needs_step()
        bench.save()

    def test_an_answer_from_before_the_last_save_says_nothing(self, bench: SchedulerBench) -> None:
        for name in ("1", "2"):
            bench.arrive(name, HISTORY[: 10 * int(name)])
        for lookup in bench.pool.lookups:
            lookup.answer(ABSENT)
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
        bench.run("1", HISTORY[:10], answer=ABSENT)
        first = bench.jobs
        bench.run("2", HISTORY[:15], answer=ABSENT)
        bench.run("3", HISTORY[:20], answer=ABSENT)
        assert bench.jobs.saves == []
        assert bench.half.needs_step()
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
        bench.run("1", HISTORY[:10], answer=ABSENT)
        first = bench.jobs
        bench.run("2", HISTORY, answer=ABSENT)
        bench.evict()
        bench.write(*first.saves)
        bench.save()
        bench.step()
        assert bench.pool.lookups == []
        assert not bench.half.needs_step()

    def test_a_user_who_only_hits_hbm_is_checked_now_and_then(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=ABSENT)
        bench.save()
        start = bench.clock.now
        for name, after, asked in [("2", 1, False), ("3", RECHECK_SECONDS - 1, False), ("4", RECHECK_SECONDS, True)]:
            bench.clock.now = start + after
            bench.run(name, HISTORY)
            assert bool(bench.pool.lookups) == asked
        # The pool has forgotten him.
        bench.asked().answer(ABSENT)
        assert len(bench.step().saves) == 1
        bench.save()
        bench.clock.now += RECHECK_SECONDS - 1
        bench.run("5", HISTORY)
        assert bench.pool.lookups == []

    def test_a_user_who_was_in_hbm_before_is_checked_at_once(self, bench: SchedulerBench) -> None:
        """His save may have been dropped; nobody knows of one."""
        bench.run("1", HISTORY, answer=ABSENT)
        bench.save()
        bench.run("2", HISTORY[:3], user="v", answer=UNKNOWN)
        drain(bench)
        bench.clock.now += RETRY_SECONDS
        bench.run("3", HISTORY[:3], user="v")
        bench.asked().answer(ABSENT)
        assert [job.uid for job in bench.step().saves] == ["v"]
        bench.save()

    def test_a_user_whose_entry_has_changed_is_checked_at_once(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=ABSENT)
        bench.save()
        bench.users.table.acquire(UserKey("u"))
        bench.users.table.shorten(UserKey("u"), 8)  # Somebody needed the room.
        bench.users.table.release(UserKey("u"))
        bench.run("2", HISTORY[:8])
        bench.asked().answer(FULL)
        assert bench.step().saves == []

    @pytest.mark.parametrize("failure", ["a rank", "the commit", "the look-up"])
    def test_a_save_that_failed_is_tried_again(self, bench: SchedulerBench, failure: str) -> None:
        bench.run("1", HISTORY, answer=UNKNOWN if failure == "the look-up" else ABSENT)
        if failure == "a rank":
            bench.write(ok=False)
        elif failure == "the commit":
            bench.write()
            bench.pool.commits.pop().answer(REFUSED)
        else:
            bench.asked().answer(UNKNOWN)
        bench.step()
        bench.clock.now += RETRY_SECONDS - 0.1
        bench.run("2", HISTORY)
        assert bench.pool.lookups == []
        bench.clock.now += 0.2
        bench.run("3", HISTORY)
        bench.asked().answer(ABSENT)
        assert len(bench.step().saves) == 1
        bench.save()
        assert bench.half.take_stats().reduce()["committed_saves"] == 1

    def test_a_user_who_hits_hbm_only_in_part_is_not_checked(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=ABSENT)
        bench.save()
        bench.clock.now += 2 * RECHECK_SECONDS
        bench.arrive("2", [*HISTORY, 50])
        bench.asked().answer(FULL)
        bench.start("2", bench.find("2") or 0)
        assert bench.pool.lookups == []
        bench.finish("2", computed=0)

    def test_all_counts_have_a_metric(self, bench: SchedulerBench) -> None:
        seen: set[str] = set()
        for user, answer in enumerate([ABSENT, UNKNOWN, FULL, answer_of(record_of(HISTORY), tier=Tier.SSD)]):
            bench.run(str(user), HISTORY, user=str(user), answer=answer)
            drain(bench)
            bench.evict()
            seen |= bench.half.take_stats().reduce().keys()
        for user in "abcdefghijk":
            bench.run(user, HISTORY[:4], user=user, answer=ABSENT)
            bench.write(ok=user != "a")
        bench.save()
        seen |= bench.half.take_stats().reduce().keys()
        assert seen <= COUNTERS.keys()
        assert {"dropped_saves", "pool_lookups_ssd", "pool_lookups_failed", "unneeded_saves"} <= seen


class TestNewWeights:
    """``histories_forgotten``: KV of old and new weights never meet."""

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
        new.answer(ABSENT)
        assert bench.find("1") == 0
        bench.half.finished("1")

    def test_an_answer_from_before_is_forgotten(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.clock.now += 0.1
        bench.users.reset()
        assert bench.find("1") is None
        assert bench.asked().namespace == "n2"
        bench.half.finished("1")

    def test_what_runs_is_not_saved(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(ABSENT)
        bench.find("1")
        bench.start("1", 0)
        bench.users.reset()
        bench.finish("1")
        assert bench.step().saves == []
        assert bench.pool.lookups == []

    def test_saves_under_way_are_given_up(self, bench: SchedulerBench) -> None:
        """vLLM's own cache is reset only if nobody holds a block."""
        bench.run("1", HISTORY, answer=ABSENT)
        shipped = bench.jobs.saves
        bench.arrive("2", HISTORY, user="v", read=False)
        bench.find("2")
        bench.start("2", 0)
        bench.finish("2")
        bench.users.reset()
        assert bench.blocks.num_free == 100
        bench.asked().answer(ABSENT)
        bench.write(*shipped)
        bench.step()
        assert bench.pool.commits == bench.jobs.saves == []

    def test_a_commit_under_way_keeps_its_name(self, bench: SchedulerBench) -> None:
        """What it names was written before."""
        bench.run("1", HISTORY, answer=ABSENT)
        bench.write()
        bench.users.reset()
        (commit,) = bench.pool.commits
        assert commit.namespace == "n1"
        bench.save()

    def test_what_waited_for_a_save_is_forgotten(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY[:10], answer=ABSENT)
        first = bench.jobs
        bench.run("2", HISTORY, answer=ABSENT)
        assert bench.half.needs_step()
        bench.users.reset()
        assert not bench.half.needs_step()
        bench.write(*first.saves)
        bench.step()
        assert bench.pool.lookups == bench.pool.commits == []

    def test_a_save_of_old_weights_that_ends_late(self, bench: SchedulerBench) -> None:
        """It is not what the user's next history waits for."""
        bench.run("1", HISTORY[:6], answer=ABSENT)
        old = bench.jobs
        bench.clock.now += 0.1
        bench.users.reset()
        bench.run("2", HISTORY[:10], answer=ABSENT)
        new = bench.jobs
        assert [job.namespace for job in new.saves] == ["n2"]
        bench.run("3", HISTORY, answer=ABSENT)
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
        bench.asked().answer(ABSENT)
        bench.find("1")
        bench.start("1", 0)
        bench.clock.now += 0.1
        bench.users.reset()
        assert bench.half.find("1", 30, 0) == 0
        assert bench.pool.lookups == []
        bench.finish("1")

    def test_users_are_saved_again(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=ABSENT)
        bench.save()
        bench.clock.now += 0.1
        bench.users.reset()
        bench.run("2", HISTORY, answer=ABSENT)
        assert [job.namespace for job in bench.jobs.saves] == ["n2"]
        bench.save()


@pytest.mark.parametrize("bench", [{"save_during_forward": True, "load_async": False}], indirect=True)
class TestSavingDuringTheForwardPass:
    """Layerwise: the step that computes the end of a history saves it, too."""

    def begin(self, bench: SchedulerBench, history: list[int], answer: PoolAnswer, computed: int | None = None) -> int:
        """Start a request; the step computes up to ``computed`` tokens. Returns what it loads."""
        bench.arrive("1", history)
        bench.asked().answer(answer)
        external = bench.find("1") or 0
        request = bench.requests["1"]
        request.blocks = bench.blocks.take(-(-request.num_tokens // 4))
        bench.users.start("1", request.lookup, 0, external)
        bench.half.allocated("1", [block.block_id for block in request.blocks], external)
        end = request.num_tokens if computed is None else computed
        bench.half.step_computes("1", external, end, request.blocks)
        bench.step()
        return external

    def test_saved_and_confirmed_in_one_step(self, bench: SchedulerBench) -> None:
        self.begin(bench, HISTORY, ABSENT)
        (job,) = bench.jobs.saves
        assert job.during_forward
        assert job.live_block == bench.requests["1"].blocks[5].block_id
        bench.write()
        assert bench.pool.commits == []
        bench.finish("1")
        assert bench.pool.commits[0].record.tokens.tolist() == HISTORY
        bench.save()
        bench.run("2", HISTORY)
        assert bench.pool.lookups == []

    def test_only_the_step_that_ends_the_history(self, bench: SchedulerBench) -> None:
        self.begin(bench, HISTORY, ABSENT, computed=len(HISTORY) - 1)
        assert bench.jobs.saves == []
        blocks = bench.requests["1"].blocks
        bench.half.step_computes("1", len(HISTORY) - 1, len(HISTORY) + 1, blocks)
        (job,) = bench.step().saves
        bench.half.step_computes("1", len(HISTORY) + 1, len(HISTORY) + 2, blocks)
        assert bench.step().saves == []
        bench.users.publish("1", len(HISTORY) + 1, blocks)
        bench.write(job)
        bench.save()
        bench.half.step_computes("1", len(HISTORY) + 2, len(HISTORY) + 3, blocks)
        assert bench.step().saves == []
        bench.finish("1")

    def test_a_load_beside_it_that_fails(self, bench: SchedulerBench) -> None:
        external = self.begin(bench, HISTORY, answer_of(record_of(HISTORY[:9], 5)))
        assert external == 9
        (load,), (save,) = bench.jobs.loads, bench.jobs.saves
        bench.half.loaded({load.job_id: (1, False)})
        bench.write(save)
        assert bench.pool.commits == []
        assert bench.pool.removed == [extent for extent, _ in save.extents]
        bench.finish("1")
        drain(bench)

    def test_after_a_failed_load_the_old_answer_is_not_believed(self, bench: SchedulerBench) -> None:
        """The request computes all of its history then; the record may name extents that are gone."""
        self.begin(bench, HISTORY, FULL, computed=0)
        bench.half.loaded({bench.jobs.loads[0].job_id: (1, False)})
        bench.half.step_computes("1", 0, bench.requests["1"].num_tokens, bench.requests["1"].blocks)
        bench.step()
        bench.finish("1")
        bench.step()
        assert len(bench.pool.lookups) == 1
        drain(bench)

    def test_an_answer_from_before_the_last_save_says_nothing(self, bench: SchedulerBench) -> None:
        bench.arrive("late", HISTORY)
        bench.asked().answer(ABSENT)
        bench.clock.now += 1
        self.begin(bench, HISTORY[:10], ABSENT)
        bench.write()
        bench.finish("1")
        bench.save()
        bench.clock.now += 1
        assert bench.find("late") == 0
        request = bench.requests["late"]
        bench.start("late", 0)
        bench.half.step_computes("late", request.local, request.num_tokens, request.blocks)
        bench.step()
        bench.write()
        bench.finish("late")
        # Nothing is committed on that base: it would be refused.
        assert [commit.base_generation for commit in bench.pool.commits] == []
        bench.step()
        bench.asked().answer(answer_of(record_of(HISTORY[:10], 7)))
        bench.step()
        bench.write()
        assert [commit.base_generation for commit in bench.pool.commits] == [7]
        bench.save()

    @pytest.mark.parametrize("why", ["aborted", "preempted", "new weights"])
    def test_a_step_that_did_not_do_what_it_should(self, bench: SchedulerBench, why: str) -> None:
        self.begin(bench, HISTORY, ABSENT)
        (save,) = bench.jobs.saves
        if why == "new weights":
            bench.users.reset()
        bench.finish("1", computed=0 if why != "new weights" else None)
        bench.step()
        bench.write(save)
        assert bench.pool.commits == []
        assert bench.pool.removed == [extent for extent, _ in save.extents]

    def test_a_pool_that_has_not_answered(self, bench: SchedulerBench) -> None:
        self.begin(bench, HISTORY, UNKNOWN)
        assert bench.jobs.saves == []
        bench.finish("1")
        bench.step()
        assert len(bench.pool.lookups) == 1
        drain(bench)

    def test_a_request_that_does_not_write(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY, write=False)
        bench.asked().answer(ABSENT)
        bench.find("1")
        bench.start("1", 0)
        bench.half.step_computes("1", 0, len(HISTORY) + CANDIDATES, bench.requests["1"].blocks)
        assert bench.step().saves == []
        bench.finish("1")
