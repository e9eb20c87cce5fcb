"""Saves in any order: whatever the pool answers and whenever, each block is let go exactly once."""

import random
import threading
from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.fake_pool_client import COMMIT_UNANSWERED, COMMITTED, REFUSED
from tests.support.lookup_rpc import PATIENCE, wait_until
from tests.support.records import answer_of, record_of
from tests.support.saves_bench import SavesBench
from userkv.engine.pool.scheduler.pool_client import LOOKUP_FAILED, NOT_IN_POOL, PoolCommitResult, PoolLookupResult
from userkv.engine.pool.scheduler.save import Save
from userkv.engine.pool.scheduler.save_state import SaveState
from userkv.engine.pool.wire.messages import SaveJob
from userkv.records.record import UserRecord

ANSWERS = st.sampled_from(["absent", "unknown", "tombstone", "short", "same", "other", "damaged"])


@dataclass
class Model:
    """A save as the test knows it."""

    save: Save
    job: SaveJob | None = None
    reports: int = 0
    failed: bool = False
    confirmed: bool = False
    given_up: bool = False


class SavesInAnyOrder(RuleBasedStateMachine):
    """Every step that the scheduler, the ranks and the pool can take, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = SavesBench(ranks=2, max_saves=3)
        self.models: dict[int, Model] = {}
        self.generation = 10
        self.counts: Counter[str] = Counter()
        self.refused = 0

    @rule(user=st.sampled_from("uvw"), tokens=st.integers(1, 18), during=st.booleans(), answer=ANSWERS | st.none())
    def start(self, user: str, tokens: int, during: bool, answer: str | None) -> None:
        busy = self.bench.saves.is_saving(user, "n")
        full = len(self.bench.saves) >= 3
        history = self.bench.history(list(range(tokens)), user)
        given = None if answer is None else self.answer_for(answer, tokens)
        save = self.bench.saves.start(history, given, during_forward=during)
        assert (save is None) == (busy or full)
        self.refused += full and not busy
        if save is not None and not save.state.is_over:
            self.models[save.job_id] = Model(save, confirmed=not during)
        self.bench.forget()

    @precondition(lambda self: self.bench.pool.lookups)
    @rule(which=st.randoms(use_true_random=False), answer=ANSWERS)
    def answer_lookup(self, which: random.Random, answer: str) -> None:
        lookup = self.bench.pool.lookups.pop(which.randrange(len(self.bench.pool.lookups)))
        lookup.answer(self.answer_for(answer, 12))

    @rule()
    def ship(self) -> None:
        for job in self.bench.saves.ship():
            model = self.models[job.job_id]
            assert model.job is None, "shipped twice"
            model.job = job

    @precondition(lambda self: self.writing())
    @rule(which=st.randoms(use_true_random=False), ok=st.booleans() | st.just(True), dropped=st.booleans())
    def report(self, which: random.Random, ok: bool, dropped: bool) -> None:
        model = which.choice(self.writing())
        model.reports += 1
        model.failed |= not ok
        self.bench.saves.report_write(model.save.job_id, ok, dropped and not ok)

    @precondition(lambda self: self.undecided())
    @rule(which=st.randoms(use_true_random=False))
    def confirm(self, which: random.Random) -> None:
        model = which.choice(self.undecided())
        model.confirmed = True
        self.bench.saves.confirm(model.save)

    @precondition(lambda self: self.models)
    @rule(which=st.randoms(use_true_random=False))
    def cancel(self, which: random.Random) -> None:
        model = which.choice(list(self.models.values()))
        # What is being committed was written before.
        model.failed |= model.save.state is not SaveState.COMMITTING
        self.bench.saves.cancel(model.save)

    @precondition(lambda self: self.bench.pool.commits)
    @rule(
        which=st.randoms(use_true_random=False),
        answer=st.sampled_from([COMMITTED, COMMITTED, REFUSED, COMMIT_UNANSWERED]),
    )
    def answer_commit(self, which: random.Random, answer: PoolCommitResult) -> None:
        commit = self.bench.pool.commits.pop(which.randrange(len(self.bench.pool.commits)))
        commit.answer(answer)

    @rule()
    def release(self) -> None:
        self.bench.saves.release()

    @rule()
    def abandon(self) -> None:
        self.bench.saves.cancel_all()
        assert self.bench.saves.held_blocks() == []
        for model in self.models.values():
            # What is being committed was written before.
            if model.reports < 2 or not model.confirmed:
                model.failed = model.confirmed = model.given_up = True

    @invariant()
    def references_are_right(self) -> None:
        held = Counter(block.block_id for block in self.bench.saves.held_blocks())
        assert all(block.ref_cnt == held[block.block_id] for block in self.bench.blocks.blocks)  # type: ignore[attr-defined]

    @invariant()
    def ended_once(self) -> None:
        self.counts.update(self.bench.saves.take_counts())
        assert len(self.bench.ended) == sum(self.counts.values()) - self.refused
        over = sum(model.save.state.is_over for model in self.models.values())
        assert len(self.bench.saves) == len(self.models) - over

    @invariant()
    def what_is_written_is_held(self) -> None:
        held = {block.block_id for block in self.bench.saves.held_blocks()}
        for model in self.writing():
            assert model.job is not None
            assert model.given_up or {block for _, blocks in model.job.extents for block in blocks} <= held

    @invariant()
    def only_good_saves_are_committed(self) -> None:
        for commit in self.bench.pool.commits:
            (model,) = [m for m in self.models.values() if m.save.plan and m.save.plan.record is commit.record]
            assert model.reports == 2
            assert model.confirmed
            assert not model.failed

    def teardown(self) -> None:
        for _ in range(5):
            for lookup in self.bench.pool.lookups:
                lookup.answer(NOT_IN_POOL)
            self.bench.pool.lookups.clear()
            self.ship()
            for model in self.writing():
                self.bench.saves.report_write(model.save.job_id, True)
                model.reports += 1
            for model in self.undecided():
                self.bench.saves.confirm(model.save)
                model.confirmed = True
            for commit in self.bench.pool.commits:
                commit.answer(COMMITTED)
            self.bench.pool.commits.clear()
        self.bench.assert_over(*(ok for _, ok in self.bench.ended))

    def writing(self) -> list[Model]:
        return [model for model in self.models.values() if model.job is not None and model.reports < 2]

    def undecided(self) -> list[Model]:
        """Shipped with a step that is not confirmed: vLLM confirms no step before it was shipped."""
        return [model for model in self.models.values() if not model.confirmed and model.job is not None]

    def answer_for(self, kind: str, tokens: int) -> PoolLookupResult:
        self.generation += 1
        match kind:
            case "absent":
                return NOT_IN_POOL
            case "unknown":
                return LOOKUP_FAILED
            case "tombstone":
                return answer_of(UserRecord.tombstone(self.generation, "w", 1.0))
            case "short":
                return answer_of(record_of(range(5), self.generation))
            case "same":
                return answer_of(record_of(range(20), self.generation))
            case "other":
                return answer_of(record_of([0, 1, 2, 3, 4, 99, 98, 97, 96], self.generation))
            case _:
                return answer_of(
                    record_of(range(max(tokens, 9)), self.generation), [True, *[False] * 4][: -(-max(tokens, 9) // 8)]
                )


TestSavesInAnyOrder = SavesInAnyOrder.TestCase
TestSavesInAnyOrder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_two_threads() -> None:
    """The scheduler's thread and the RPC client's, as fast as they can."""
    bench = SavesBench(ranks=2, max_saves=20)
    stop = threading.Event()
    shipped: list[SaveJob] = []

    def answer() -> None:
        rng = random.Random(1)
        while not stop.is_set() or len(bench.saves):
            for waiting in (bench.pool.lookups, bench.pool.commits):
                if waiting:
                    asked = waiting.pop(0)
                    good, bad = (NOT_IN_POOL, LOOKUP_FAILED) if waiting is bench.pool.lookups else (COMMITTED, REFUSED)
                    asked.answer(good if rng.random() < 0.8 else bad)  # type: ignore[arg-type]
            if shipped:
                job = shipped.pop(0)
                bench.saves.report_write(job.job_id, rng.random() < 0.9)
                bench.saves.report_write(job.job_id, True)

    thread = threading.Thread(target=answer)
    thread.start()
    started = 0
    counts: Counter[str] = Counter()
    rng = random.Random(2)
    while started < 1500:
        counts += bench.saves.take_counts()
        if bench.blocks.num_free > 5:
            during = rng.random() < 0.5
            history = bench.history(list(range(rng.randrange(1, 18))), str(rng.randrange(30)))
            save = bench.saves.start(history, NOT_IN_POOL if during else None, during_forward=during)
            bench.forget()
            shipped += bench.saves.ship()
            if save is not None:
                started += 1
                if during:
                    (bench.saves.confirm if rng.random() < 0.8 else bench.saves.cancel)(save)
        else:
            shipped += bench.saves.ship()
        bench.saves.release()
    stop.set()

    def all_over() -> bool:
        shipped.extend(bench.saves.ship())
        return len(bench.saves) == 0

    wait_until(all_over)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(bench.ended) == started
    bench.assert_over(*(ok for _, ok in bench.ended))
    counts += bench.saves.take_counts()
    assert counts["committed_saves"] == sum(ok for _, ok in bench.ended)
    assert counts.total() - counts["dropped_saves"] == started
