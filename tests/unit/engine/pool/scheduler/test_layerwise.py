"""Histories that are saved by the very step that computes them. Every test ends with all blocks free."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.records import answer_of, record_of
from tests.support.scheduler_bench import CANDIDATES, FULL, HISTORY, SchedulerBench, drain
from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, NOT_IN_POOL, PoolLookupResult


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[SchedulerBench]:
    options: dict[str, Any] = getattr(request, "param", {})
    bench = SchedulerBench(**options)
    yield bench
    bench.assert_nothing_is_held()


@pytest.mark.parametrize("bench", [{"save_during_forward": True}], indirect=True)
class TestSavingDuringTheForwardPass:
    """Layerwise: the step that computes the end of a history saves it, too."""

    def begin(
        self, bench: SchedulerBench, history: list[int], answer: PoolLookupResult, computed: int | None = None
    ) -> int:
        """Start a request; the step computes up to ``computed`` tokens. Returns what it loads."""
        bench.arrive("1", history)
        bench.asked().answer(answer)
        external = bench.find("1") or 0
        request = bench.requests["1"]
        request.blocks = bench.blocks.take(-(-request.num_tokens // 4))
        bench.users.start("1", request.lookup, 0, external)
        bench.scheduler.start_request("1", [block.block_id for block in request.blocks], external)
        end = request.num_tokens if computed is None else computed
        bench.scheduler.save_during_step("1", external, end, request.blocks)
        bench.step()
        return external

    def test_saved_and_confirmed_in_one_step(self, bench: SchedulerBench) -> None:
        self.begin(bench, HISTORY, NOT_IN_POOL)
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
        self.begin(bench, HISTORY, NOT_IN_POOL, computed=len(HISTORY) - 1)
        assert bench.jobs.saves == []
        blocks = bench.requests["1"].blocks
        bench.scheduler.save_during_step("1", len(HISTORY) - 1, len(HISTORY) + 1, blocks)
        (job,) = bench.step().saves
        bench.scheduler.save_during_step("1", len(HISTORY) + 1, len(HISTORY) + 2, blocks)
        assert bench.step().saves == []
        bench.users.keep_history("1", len(HISTORY) + 1, blocks)
        bench.write(job)
        bench.save()
        bench.scheduler.save_during_step("1", len(HISTORY) + 2, len(HISTORY) + 3, blocks)
        assert bench.step().saves == []
        bench.finish("1")

    def test_a_step_behind_the_history(self, bench: SchedulerBench) -> None:
        """All of it is loaded, so the step computes candidates only."""
        assert self.begin(bench, HISTORY, FULL) == len(HISTORY)
        assert bench.jobs.saves == []
        assert "unneeded_saves" not in bench.scheduler.take_stats().reduce()
        bench.scheduler.report_loads({bench.jobs.loads[0].job_id: (1, True)})
        bench.finish("1")

    def test_a_load_beside_it_that_fails(self, bench: SchedulerBench) -> None:
        external = self.begin(bench, HISTORY, answer_of(record_of(HISTORY[:9], 5)))
        assert external == 9
        (load,), (save,) = bench.jobs.loads, bench.jobs.saves
        bench.scheduler.report_loads({load.job_id: (1, False)})
        bench.write(save)
        assert bench.pool.commits == []
        assert bench.pool.removed == [extent for extent, _ in save.extents]
        bench.finish("1")
        drain(bench)

    def test_after_a_failed_load_the_old_answer_is_not_believed(self, bench: SchedulerBench) -> None:
        """The request computes all of its history then; the record may name extents that are gone."""
        self.begin(bench, HISTORY, FULL, computed=0)
        bench.scheduler.report_loads({bench.jobs.loads[0].job_id: (1, False)})
        bench.scheduler.save_during_step("1", 0, bench.requests["1"].num_tokens, bench.requests["1"].blocks)
        bench.step()
        bench.finish("1")
        bench.step()
        assert len(bench.pool.lookups) == 1
        drain(bench)

    def test_an_answer_from_before_the_last_save_says_nothing(self, bench: SchedulerBench) -> None:
        bench.arrive("late", HISTORY)
        bench.asked().answer(NOT_IN_POOL)
        bench.clock.now += 1
        self.begin(bench, HISTORY[:10], NOT_IN_POOL)
        bench.write()
        bench.finish("1")
        bench.save()
        bench.clock.now += 1
        assert bench.find("late") == 0
        request = bench.requests["late"]
        bench.start("late", 0)
        bench.scheduler.save_during_step("late", request.local, request.num_tokens, request.blocks)
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
        self.begin(bench, HISTORY, NOT_IN_POOL)
        (save,) = bench.jobs.saves
        if why == "new weights":
            bench.users.reset()
        bench.finish("1", computed=0 if why != "new weights" else None)
        bench.step()
        bench.write(save)
        assert bench.pool.commits == []
        assert bench.pool.removed == [extent for extent, _ in save.extents]

    def test_a_pool_that_has_not_answered(self, bench: SchedulerBench) -> None:
        self.begin(bench, HISTORY, LOOKUP_FAILED)
        assert bench.jobs.saves == []
        bench.finish("1")
        bench.step()
        assert len(bench.pool.lookups) == 1
        drain(bench)

    def test_a_request_that_does_not_write(self, bench: SchedulerBench) -> None:
        bench.arrive("1", HISTORY, write=False)
        bench.asked().answer(NOT_IN_POOL)
        bench.find("1")
        bench.start("1", 0)
        bench.scheduler.save_during_step("1", 0, len(HISTORY) + CANDIDATES, bench.requests["1"].blocks)
        assert bench.step().saves == []
        bench.finish("1")
