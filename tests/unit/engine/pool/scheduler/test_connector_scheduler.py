"""What the connector asks the pool and loads, and when. Every test ends with all blocks free."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.records import answer_of, record_of
from tests.support.scheduler_bench import FULL, HISTORY, SchedulerBench, drain
from userkv.core.request import KVScope, UserKey
from userkv.engine.pool.scheduler import loads
from userkv.engine.pool.scheduler.loads import AVOID_SECONDS
from userkv.engine.pool.scheduler.lookup import ANSWER_SECONDS, MAX_QUESTIONS
from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, NOT_IN_POOL, PoolLookupResult
from userkv.records.record import UserRecord
from userkv.store.backend import Tier


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[SchedulerBench]:
    options: dict[str, Any] = getattr(request, "param", {})
    bench = SchedulerBench(**options)
    yield bench
    bench.assert_nothing_is_held()


class TestAsking:
    """When the pool is asked, and what its answer is worth."""

    def test_a_new_user(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        lookup = bench.asked()
        assert (lookup.uid, lookup.namespace) == ("u", "n1")
        assert bench.find("1") is None
        assert bench.find("1") is None
        assert bench.pool.lookups == []
        lookup.answer(NOT_IN_POOL)
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1", computed=0)
        assert bench.scheduler.take_stats().reduce() == {"pool_lookups_miss": 1}

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
        bench.scheduler.report_loads({job.job_id: (1, True)})
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
        bench.scheduler.report_loads({bench.jobs.loads[0].job_id: (1, True)})
        bench.finish("1", computed=0)

    def test_the_engine_computes_one_token_itself(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.requests["1"].num_tokens = len(HISTORY)  # A request without candidates.
        bench.asked().answer(FULL)
        assert bench.find("1") == 21
        bench.requests.clear()
        bench.scheduler.finish_request("1")

    @pytest.mark.parametrize("answer", [LOOKUP_FAILED, answer_of(UserRecord.tombstone(3, "w", 1.0))])
    def test_nothing_to_load(self, bench: SchedulerBench, answer: PoolLookupResult) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(answer)
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1", computed=0)
        found = "miss" if answer.succeeded else "failed"
        assert bench.scheduler.take_stats().reduce() == {f"pool_lookups_{found}": 1}

    def test_what_is_left_of_a_damaged_record(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(answer_of(record_of(HISTORY), [True, False, True]))
        assert bench.find("1") == 8
        bench.scheduler.finish_request("1")

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
        second.answer(NOT_IN_POOL)
        assert bench.find("1") == 0
        bench.scheduler.finish_request("1")

    def test_a_question_without_an_answer_is_not_stale(self, bench: SchedulerBench) -> None:
        """It has a time-out of its own; asking again and again would never end."""
        bench.arrive("1", HISTORY)
        bench.clock.now += 10 * ANSWER_SECONDS
        assert bench.find("1") is None
        assert len(bench.pool.lookups) == 1
        bench.scheduler.finish_request("1")

    def test_an_answer_is_asked_for_again_once(self, bench: SchedulerBench) -> None:
        """Where steps take longer than answers are trusted, a request would ask for ever."""
        bench.arrive("1", HISTORY)
        for is_new in (True, False):
            asked = bench.asked()
            assert asked.is_new_request == is_new, "a request counts once, however often it asks"
            asked.answer(FULL)
            bench.clock.now += 2 * ANSWER_SECONDS
            found = bench.find("1")
        assert found == 22
        assert bench.pool.lookups == []
        bench.scheduler.finish_request("1")

    def test_what_was_saved_while_a_request_waited_is_found(self, bench: SchedulerBench) -> None:
        """Two requests of a new user come at once. The second one waits until the first has been saved and left HBM."""
        bench.arrive("1", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        bench.arrive("2", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1")
        bench.step()
        bench.clock.now += 0.1
        bench.save()
        bench.evict()
        assert bench.find("2") is None
        bench.asked().answer(FULL)
        assert bench.find("2") == 22
        bench.scheduler.finish_request("2")

    def test_saves_do_not_keep_a_request_waiting_for_ever(self, bench: SchedulerBench) -> None:
        bench.arrive("patient", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        for number in range(2 * MAX_QUESTIONS):
            bench.run(str(number), [*HISTORY[:4], number], answer=NOT_IN_POOL)
            bench.clock.now += 0.1
            bench.save()
            bench.evict()
            if bench.find("patient") is None:
                bench.asked().answer(answer_of(record_of(HISTORY[:4])))
        assert bench.find("patient") == 4
        assert bench.pool.lookups == []
        bench.scheduler.finish_request("patient")

    def test_a_request_counts_once(self, bench: SchedulerBench) -> None:
        """It may be preempted, and get blocks again."""
        bench.arrive("1", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        bench.find("1")
        bench.start("1", 0)
        bench.scheduler.start_request("1", [1, 2, 3], 0)
        assert bench.scheduler.take_stats().reduce() == {"pool_lookups_miss": 1}
        bench.finish("1", computed=0)

    def test_a_history_that_left_hbm_meanwhile(self, bench: SchedulerBench) -> None:
        bench.run("1", HISTORY, answer=FULL)
        bench.arrive("2", HISTORY)
        bench.evict()
        assert bench.find("2") is None
        bench.asked().answer(FULL)
        assert bench.find("2") == 22
        bench.scheduler.finish_request("2")

    @pytest.mark.parametrize("bench", [{"loads": False}], indirect=True)
    def test_an_engine_that_only_saves(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        assert bench.find("1") == 0
        assert bench.pool.lookups == []
        bench.start("1", 0)
        bench.finish("1")
        bench.step()
        bench.asked().answer(NOT_IN_POOL)
        assert len(bench.step().saves) == 1
        bench.save()

    @pytest.mark.parametrize("bench", [{"saves": False}], indirect=True)
    def test_an_engine_that_only_loads(self, bench: SchedulerBench) -> None:
        assert bench.run("1", HISTORY, answer=FULL) == 22
        assert bench.jobs.saves == []
        assert not bench.scheduler.needs_step()
        bench.scheduler.save_during_step("1", 0, 30, ())

    def test_a_request_that_does_not_read(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY, read=False)
        assert bench.pool.lookups == []
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1")
        bench.asked().answer(NOT_IN_POOL)
        assert len(bench.step().saves) == 1
        bench.save()

    def test_a_request_that_does_not_write(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY, write=False)
        bench.asked().answer(NOT_IN_POOL)
        assert bench.find("1") == 0
        bench.start("1", 0)
        bench.finish("1")
        assert bench.step().saves == []
        assert len(bench.saves or ()) == 0

    def test_kv_that_cannot_be_named_stays_out_of_the_pool(self, bench: SchedulerBench) -> None:
        bench.namespaces.current = ""
        for name in ("1", "2"):
            bench.arrive(name, HISTORY)
            assert bench.find(name) == 0
            bench.start(name, 0)
            bench.finish(name)
        assert bench.step().saves == []
        assert bench.pool.lookups == []

    def test_requests_that_nobody_announced(self, bench: SchedulerBench) -> None:
        assert bench.scheduler.find_loadable("x", 10, 0) == 0
        bench.scheduler.start_request("x", [1, 2], 0)
        bench.scheduler.finish_request("x")
        assert bench.scheduler.hit_tier("x") is None

    def test_users_with_adapters_and_salts_have_other_names(self, bench: SchedulerBench) -> None:
        lookup = bench.requests
        bench.arrive("1", HISTORY, user="u/x@")
        assert bench.asked().uid == "u%2Fx%40"
        lookup["1"].lookup.key = UserKey("u", KVScope("adapter", "/path", "salt"))
        bench.scheduler.add_request("2", lookup["1"].lookup, 30)
        assert bench.asked().uid == "u/adapter/%2Fpath/salt"
        bench.scheduler.finish_request("1")
        bench.scheduler.finish_request("2")


class TestLoading:
    """From the answer to the KV."""

    def test_a_load_that_works(self, bench: SchedulerBench) -> None:
        assert bench.run("1", HISTORY, answer=answer_of(record_of(HISTORY), tier=Tier.SSD)) == 22
        stats = bench.scheduler.take_stats().reduce()
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
        bench.scheduler.report_loads({job.job_id: (2, True)})
        assert "swapin_successes" not in bench.scheduler.take_stats().reduce()
        bench.scheduler.report_loads({job.job_id: (1, True)})
        assert bench.scheduler.take_stats().reduce()["swapin_successes"] == 1
        bench.finish("1", computed=0)

    def test_who_has_loaded_computes_the_rest(self, bench: SchedulerBench) -> None:
        """vLLM asks again when the load is over, and when the request was preempted."""
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        (job,) = bench.jobs.loads
        bench.scheduler.start_request("1", [1] * 10, 22)
        assert bench.step().loads == []
        bench.scheduler.report_loads({job.job_id: (1, True)})
        assert bench.scheduler.find_loadable("1", 24, 0) == 0
        assert bench.pool.lookups == []
        bench.finish("1", computed=0)

    @pytest.mark.parametrize("bench", [{"ranks": 2}], indirect=True)
    @pytest.mark.parametrize("reports", [[(2, False)], [(1, True), (1, False)], [(1, False), (1, True)]])
    def test_a_load_that_fails(self, bench: SchedulerBench, reports: list[tuple[int, bool]]) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        for report in reports:
            bench.scheduler.report_loads({bench.jobs.loads[0].job_id: report})
        assert bench.scheduler.find_loadable("1", 24, 0) == 0
        assert bench.pool.lookups == []
        stats = bench.scheduler.take_stats().reduce()
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
        bench.scheduler.report_loads({bench.jobs.loads[0].job_id: (1, False)})
        bench.finish("bad", computed=0)
        bench.step()

    def test_a_record_from_which_a_load_failed_is_left_alone(self, bench: SchedulerBench) -> None:
        self.fail(bench, 5)
        bench.clock.now += AVOID_SECONDS - 0.1
        bench.arrive("2", HISTORY)
        bench.asked().answer(FULL)
        assert bench.find("2") == 0
        bench.clock.now += 0.2
        assert bench.find("2") == 22
        bench.scheduler.finish_request("2")

    def test_its_successor_is_tried_at_once(self, bench: SchedulerBench) -> None:
        self.fail(bench, 5)
        bench.arrive("2", HISTORY)
        bench.asked().answer(answer_of(record_of(HISTORY, 6)))
        assert bench.find("2") == 22
        bench.arrive("other", HISTORY, user="v")
        bench.asked().answer(FULL)
        assert bench.find("other") == 22
        bench.scheduler.finish_request("2")
        bench.scheduler.finish_request("other")

    def test_not_every_bad_record_is_remembered_for_ever(
        self, bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loads, "MAX_AVOIDED", 2)
        for user in "abc":
            bench.arrive(user, HISTORY, user=user)
            bench.asked().answer(FULL)
            bench.start(user, bench.find(user) or 0)
            bench.scheduler.report_loads({bench.jobs.loads[0].job_id: (1, False)})
            bench.finish(user, computed=0)
        for user, found in {"a": 22, "b": 0, "c": 0}.items():
            bench.arrive(user * 2, HISTORY, user=user)
            bench.asked().answer(FULL)
            assert bench.find(user * 2) == found
            bench.scheduler.finish_request(user * 2)

    def test_the_request_ends_while_it_loads(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        (job,) = bench.jobs.loads
        bench.finish("1", computed=0)
        bench.step()
        bench.scheduler.report_loads({job.job_id: (1, False)})
        assert bench.scheduler.hit_tier("1") is None

    def test_what_a_preempted_request_loads_was_counted_when_it_started_first(self, bench: SchedulerBench) -> None:
        bench.run("0", HISTORY, answer=NOT_IN_POOL)
        drain(bench)
        bench.arrive("1", HISTORY)
        assert bench.find("1") == 0
        bench.start("1", 0)
        request = bench.requests["1"]
        bench.users.finish("1", 0, request.blocks)
        bench.blocks.free_blocks(reversed(request.blocks))
        bench.evict()
        bench.scheduler.take_stats()
        assert bench.find("1") is None
        bench.asked().answer(FULL)
        bench.start("1", bench.find("1") or 0)
        bench.scheduler.report_loads({bench.jobs.loads[0].job_id: (1, True)})
        stats = bench.scheduler.take_stats().reduce()
        assert (stats["swapin_attempts"], stats["swapin_successes"], stats["swapin_tokens_dram"]) == (1, 1, 0)
        assert bench.users.stats.take()["history_tokens"] == 2 * len(HISTORY)
        bench.finish("1", computed=0)
        drain(bench)

    def test_where_the_tokens_come_from(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY)
        assert bench.scheduler.hit_tier("1") is None
        bench.asked().answer(answer_of(record_of(HISTORY), tier=Tier.SSD))
        assert bench.scheduler.hit_tier("1") is Tier.SSD
        bench.scheduler.finish_request("1")
