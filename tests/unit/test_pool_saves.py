"""Saves from start to end: whatever the pool answers and in whatever order, each block is let go exactly once."""

import random
import threading
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.agreed import COMMITTED, NOBODY_KNOWS, REFUSED, FakeAgreedPool, NumberedPool
from tests.support.records import BLOCK, answer_of, record_of
from tests.support.rpc import PATIENCE, wait_until
from userkv.core.record import UserRecord
from userkv.core.request import UserKey
from userkv.core.tokens import as_tokens
from userkv.engine.pool.agreement import ABSENT, UNKNOWN, CommitAnswer, PoolAnswer
from userkv.engine.pool.messages import SaveJob
from userkv.engine.pool.saves import History, PoolSaves, Save


class Bench:
    """Saves over a pool that answers when it is told to. ``ended``: how each save ended."""

    def __init__(self, ranks: int = 2, max_saves: int = 3, ttl_seconds: float = 0, max_held_blocks: int = 60) -> None:
        self.blocks = NumberedPool(60)
        self.pool = FakeAgreedPool(ranks)
        self.ended: list[tuple[Save, bool]] = []
        self.saves = PoolSaves(
            self.pool,  # type: ignore[arg-type]
            self.blocks,
            BLOCK,
            2,
            max_saves,
            max_held_blocks,
            ttl_seconds,
            "writer",
        )
        self.saves.ended = lambda save, ok: self.ended.append((save, ok))
        self.owned: list[list[object]] = []

    def history(self, tokens: list[int], user: str = "u", namespace: str = "n") -> History:
        """A history whose blocks somebody references for now."""
        blocks = self.blocks.take(-(-len(tokens) // BLOCK))
        self.owned.append(blocks)
        return History(UserKey(user), user, namespace, as_tokens(tokens), tuple(blocks))

    def forget(self) -> None:
        """HBM evicts everything."""
        for blocks in self.owned:
            self.blocks.free_blocks(reversed(blocks))
        self.owned.clear()

    def report(self, save: Save, *oks: bool, dropped: bool = False) -> None:
        for ok in oks:
            self.saves.saved(save.job_id, ok, dropped)

    def begin(self, tokens: int = 10, answer: PoolAnswer | None = ABSENT, during_forward: bool = False) -> Save:
        save = self.saves.start(self.history(list(range(tokens))), answer, during_forward=during_forward)
        assert save is not None
        return save

    def ship(self) -> SaveJob:
        (job,) = self.saves.ship()
        return job

    def assert_over(self, *oks: bool) -> None:
        """All saves have ended like this, and nothing is held any more."""
        self.saves.release()
        self.forget()
        assert [ok for _, ok in self.ended] == list(oks)
        assert len(self.saves) == 0
        assert not self.saves.has_unshipped()
        assert not self.saves.holds_blocks()
        assert self.saves.held_blocks() == []
        assert self.blocks.num_free == len(self.blocks.blocks)


@pytest.mark.parametrize("asked", [True, False])
def test_a_save_that_works(asked: bool) -> None:
    bench = Bench()
    save = bench.begin(10, ABSENT if asked else None)
    assert bench.saves.is_saving("u", "n")
    assert bench.saves.has_unshipped()
    bench.forget()
    if not asked:
        assert bench.saves.ship() == []
        (lookup,) = bench.pool.lookups
        assert (lookup.uid, lookup.namespace) == ("u", "n")
        lookup.answer(ABSENT)
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
    bench = Bench()
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
    bench = Bench()
    base = record_of(range(16), generation=8)
    save = bench.begin(16, answer_of(base, [True, False]))
    job = bench.ship()
    assert [extent.first_block for extent, _ in job.extents] == [2]
    assert job.live_block == -1
    bench.report(save, True, True)
    assert bench.pool.commits[0].base_generation == 8
    bench.pool.commits[0].answer(CommitAnswer(True, garbage=base.extents[1:]))
    assert bench.pool.removed == [base.extents[1]]
    bench.assert_over(True)


@pytest.mark.parametrize("record", [None, UserRecord.tombstone(5, "w", 1.0)])
def test_a_user_who_is_new_or_was_deleted_is_written_whole(record: UserRecord | None) -> None:
    bench = Bench()
    save = bench.begin(10, answer_of(record))
    assert len(bench.ship().extents) == 2
    bench.report(save, True, True)
    assert bench.pool.commits[0].base_generation == (0 if record is None else 5)
    bench.pool.commits[0].answer(COMMITTED)
    bench.assert_over(True)


def test_what_the_pool_has_already_is_not_written() -> None:
    bench = Bench()
    bench.begin(10, answer_of(record_of(range(12))))
    assert bench.saves.ship() == []
    assert bench.saves.take_counts() == {"unneeded_saves": 1}
    bench.assert_over(True)


def test_a_pool_that_does_not_answer_costs_the_save() -> None:
    bench = Bench()
    bench.begin(10, UNKNOWN)
    bench.pool.lookups[0].answer(UNKNOWN)
    assert bench.saves.ship() == []
    assert bench.saves.take_counts() == {"failed_saves": 1}
    bench.assert_over(False)


@pytest.mark.parametrize("oks", [(False, True), (True, False), (False, False)])
def test_one_rank_that_fails_is_enough(oks: tuple[bool, ...]) -> None:
    bench = Bench()
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
    bench = Bench()
    save = bench.begin()
    extents = [extent for extent, _ in bench.ship().extents]
    for each in dropped:
        bench.report(save, not each, dropped=each)
    assert bench.pool.removed == extents
    assert bench.saves.take_counts() == {"dropped_saves": 1}
    bench.assert_over(False)


def test_counts_are_taken_once() -> None:
    bench = Bench()
    bench.begin(10, answer_of(record_of(range(12))))
    assert bench.saves.take_counts() == {"unneeded_saves": 1}
    assert bench.saves.take_counts() == {}
    bench.assert_over(True)


def test_a_refused_commit_leaves_nothing_behind() -> None:
    bench = Bench()
    save = bench.begin()
    extents = [extent for extent, _ in bench.ship().extents]
    bench.report(save, True, True)
    bench.pool.commits[0].answer(REFUSED)
    assert bench.pool.removed == extents
    bench.assert_over(False)


def test_a_commit_without_an_answer_may_have_happened() -> None:
    bench = Bench()
    save = bench.begin()
    bench.ship()
    bench.report(save, True, True)
    bench.pool.commits[0].answer(NOBODY_KNOWS)
    assert bench.pool.removed == []
    bench.assert_over(False)


def test_one_save_of_a_user_at_a_time_and_a_limit_for_all() -> None:
    bench = Bench(max_saves=2)
    first = bench.begin()
    assert bench.saves.start(bench.history([1, 2]), None) is None
    assert bench.saves.take_counts() == {}
    assert bench.saves.start(bench.history([1, 2], namespace="m"), None) is not None
    assert bench.saves.start(bench.history([1, 2], user="v"), None) is None
    assert bench.saves.take_counts() == {"dropped_saves": 1}
    assert not bench.saves.is_saving("v", "n")
    assert len(bench.saves) == 2
    bench.pool.lookups[0].answer(UNKNOWN)
    last = bench.saves.start(bench.history([1, 2], user="v"), ABSENT)
    assert last is not None
    assert [job.job_id for job in bench.saves.ship()] == [first.job_id, last.job_id]
    bench.report(first, False, False)
    bench.report(last, False, False)
    bench.assert_over(False, False, False)


def test_during_the_forward_pass_the_last_block_is_live_and_the_commit_waits() -> None:
    bench = Bench()
    save = bench.begin(8, ABSENT, during_forward=True)
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
    bench = Bench()
    save = bench.begin(during_forward=True)
    bench.saves.cancel(save)
    assert bench.saves.ship() == []
    bench.assert_over(False)


@pytest.mark.parametrize("when", ["before the ranks", "between the ranks", "after the ranks"])
def test_a_cancelled_save_is_never_committed(when: str) -> None:
    bench = Bench()
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
        bench = Bench()
        save = bench.begin(10, answer_of(record_of(range(10))), during_forward=True)
        getattr(bench.saves, decide)(save)
        bench.assert_over(True)


def test_reports_of_jobs_that_are_over_are_ignored() -> None:
    bench = Bench()
    save = bench.begin()
    bench.ship()
    bench.report(save, True, True, True, False)
    bench.saves.saved(999, True)
    bench.pool.commits[0].answer(COMMITTED)
    bench.report(save, True)
    assert len(bench.pool.commits) == 1
    bench.assert_over(True)


def test_records_expire_when_they_should() -> None:
    bench = Bench(ttl_seconds=60)
    save = bench.begin()
    bench.ship()
    bench.report(save, True, True)
    record = bench.pool.commits[0].record
    assert record.expires_at == record.written_at + 60
    bench.pool.commits[0].answer(COMMITTED)
    bench.assert_over(True)


def test_blocks_are_let_go_on_the_schedulers_thread_only() -> None:
    """The block pool is not thread-safe: however a save ends, its blocks wait for ``release``."""
    bench = Bench()
    save = bench.begin()
    bench.ship()
    bench.forget()
    bench.report(save, True, True)
    bench.pool.commits[0].answer(COMMITTED)
    assert bench.blocks.num_free == 57
    assert len(bench.saves.held_blocks()) == 3
    assert bench.saves.holds_blocks()
    bench.saves.release()
    assert not bench.saves.holds_blocks()
    assert bench.blocks.num_free == 60


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
        self.bench = Bench(ranks=2, max_saves=3)
        self.models: dict[int, Model] = {}
        self.generation = 10
        self.counts: Counter[str] = Counter()
        self.refused = 0

    @rule(user=st.sampled_from("uvw"), tokens=st.integers(1, 18), during=st.booleans(), answer=ANSWERS | st.none())
    def start(self, user: str, tokens: int, during: bool, answer: str | None) -> None:
        busy = self.bench.saves.is_saving(user, "n")
        full = len(self.bench.saves) >= 3
        history = self.bench.history(list(range(tokens)), user)
        ended = len(self.bench.ended)
        given = None if answer is None else self.answer_for(answer, tokens)
        save = self.bench.saves.start(history, given, during_forward=during)
        assert (save is None) == (busy or full)
        self.refused += full and not busy
        if save is not None and ended == len(self.bench.ended):
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
        self.bench.saves.saved(model.save.job_id, ok, dropped and not ok)

    @precondition(lambda self: self.undecided())
    @rule(which=st.randoms(use_true_random=False), good=st.booleans())
    def decide(self, which: random.Random, good: bool) -> None:
        model = which.choice(self.undecided())
        model.confirmed = True
        model.failed |= not good
        (self.bench.saves.confirm if good else self.bench.saves.cancel)(model.save)

    @precondition(lambda self: self.bench.pool.commits)
    @rule(
        which=st.randoms(use_true_random=False), answer=st.sampled_from([COMMITTED, COMMITTED, REFUSED, NOBODY_KNOWS])
    )
    def answer_commit(self, which: random.Random, answer: CommitAnswer) -> None:
        commit = self.bench.pool.commits.pop(which.randrange(len(self.bench.pool.commits)))
        commit.answer(answer)

    @rule()
    def release(self) -> None:
        self.bench.saves.release()

    @rule()
    def abandon(self) -> None:
        self.bench.saves.abandon()
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
        ended = [save.job_id for save, _ in self.bench.ended]
        assert len(ended) == len(set(ended))
        self.counts.update(self.bench.saves.take_counts())
        assert len(ended) == sum(self.counts.values()) - self.refused

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
                lookup.answer(ABSENT)
            self.bench.pool.lookups.clear()
            self.ship()
            for model in self.writing():
                self.bench.saves.saved(model.save.job_id, True)
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
        return [model for model in self.models.values() if not model.confirmed]

    def answer_for(self, kind: str, tokens: int) -> PoolAnswer:
        self.generation += 1
        match kind:
            case "absent":
                return ABSENT
            case "unknown":
                return UNKNOWN
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
    bench = Bench(ranks=2, max_saves=20)
    stop = threading.Event()
    shipped: list[SaveJob] = []

    def answer() -> None:
        rng = random.Random(1)
        while not stop.is_set() or len(bench.saves):
            for waiting in (bench.pool.lookups, bench.pool.commits):
                if waiting:
                    asked = waiting.pop(0)
                    good, bad = (ABSENT, UNKNOWN) if waiting is bench.pool.lookups else (COMMITTED, REFUSED)
                    asked.answer(good if rng.random() < 0.8 else bad)  # type: ignore[arg-type]
            if shipped:
                job = shipped.pop(0)
                bench.saves.saved(job.job_id, rng.random() < 0.9)
                bench.saves.saved(job.job_id, True)

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
            save = bench.saves.start(history, ABSENT if during else None, during_forward=during)
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


def test_saves_do_not_take_all_of_hbm() -> None:
    """A slow pool must leave blocks to the requests; but a single history may be as long as it is."""
    bench = Bench(max_held_blocks=6)
    long, short = bench.history(list(range(BLOCK * 8))), bench.history([1] * BLOCK, "v")
    first = bench.saves.start(long, None)
    assert first is not None
    assert bench.saves.start(short, None) is None
    assert bench.saves.counts == {"dropped_saves": 1}


@pytest.mark.parametrize("reports", [0, 1, 2])
@pytest.mark.parametrize("during_forward", [False, True])
def test_what_is_given_up_ends_without_a_commit(reports: int, during_forward: bool) -> None:
    bench = Bench()
    save = bench.begin(during_forward=during_forward)
    extents = [extent for extent, _ in bench.ship().extents]
    bench.report(save, *[True] * reports)
    bench.saves.abandon()
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
    bench = Bench(max_saves=9)
    asked = bench.saves.start(bench.history([1] * BLOCK, "asked"), None)
    ready = bench.saves.start(bench.history([1] * BLOCK, "ready"), ABSENT)
    assert asked is not None
    assert ready is not None
    bench.saves.abandon()
    assert bench.saves.held_blocks() == []
    assert bench.saves.ship() == []
    bench.pool.lookups[-1].answer(ABSENT)
    assert len(bench.saves) == 0
    assert [ok for _, ok in bench.ended] == [False, False]
