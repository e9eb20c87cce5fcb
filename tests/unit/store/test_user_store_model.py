"""Users in a pool: two engines of two workers each on one pool, against a model."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.memory_backend import MemoryBackend
from tests.support.user_pool import LAYERS, NAMESPACE, USERS, Clock, Engine, Save, group_name, record_key, stored


class Pool(RuleBasedStateMachine):
    """Saves that overlap, deletions, evictions, readers that hold leases, torn records, expiry, crashes."""

    @initialize(num_layers=st.sampled_from([0, LAYERS]))
    def start(self, num_layers: int) -> None:
        self.pool = MemoryBackend()
        self.clock = Clock()
        ids = itertools.count(1)
        self.engines = [Engine(self.pool, num_layers, ids, self.clock) for _ in range(2)]
        self.tokens = itertools.count(100)
        self.histories: dict[str, list[int]] = {uid: [] for uid in USERS}
        self.open: list[tuple[Engine, Save]] = []
        self.epoch = dict.fromkeys(USERS, 0)
        self.leaked: set[str] = set()

    @rule(
        engine=st.integers(0, 1),
        uid=st.sampled_from(USERS),
        keep=st.integers(0, 12),
        grow=st.integers(1, 6),
        ttl=st.sampled_from([0, 0, 20]),
    )
    def begin_save(self, engine: int, uid: str, keep: int, grow: int, ttl: float) -> None:
        history = self.histories[uid]
        history = history if keep > 4 else history[: -keep or None]
        self.histories[uid] = history = [*history, *itertools.islice(self.tokens, grow)]
        save = self.engines[engine].begin(uid, history, ttl, self.epoch[uid])
        assert save is not None
        self.engines[engine].write(save)
        self.open.append((self.engines[engine], save))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9))
    def commit(self, which: int) -> None:
        engine, save = self.open.pop(which % len(self.open))
        known = save.base_generation or engine.answer(save.uid)[0] is not None
        if engine.commit(save):
            # (If the pool has lost all that was after a deletion, nobody can tell any more.)
            assert not known or save.epoch == self.epoch[save.uid], "a save from before a deletion became visible"
            expired = save.plan.record.expired(engine.clock())
            assert engine.load(save.uid) == ([] if expired else save.plan.record.tokens.tolist())

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9))
    def crash(self, which: int) -> None:
        engine, save = self.open.pop(which % len(self.open))
        self.leaked |= engine.keys(save.uid, save.plan.new_extents)

    @rule(engine=st.integers(0, 1), worker=st.integers(0, 1), uid=st.sampled_from(USERS))
    def delete(self, engine: int, worker: int, uid: str) -> None:
        before = self.engines[engine].answer(uid)[0]
        self.epoch[uid] += 1
        report = self.engines[engine].workers[worker].delete(uid, NAMESPACE)
        assert report.tombstone
        assert report.complete == (not report.remaining and not report.unreadable)
        assert set(report.remaining) <= self.pool.leased
        after = self.engines[1 - engine].answer(uid)[0]
        assert after is not None
        assert after.deleted
        if before is not None:
            assert after.generation > before.generation
            assert report.found == (not before.deleted)
            there = self.engines[engine].keys(uid, before.extents) & self.pool.objects.keys()
            assert there <= set(report.remaining)

    @rule(uid=st.sampled_from(USERS))
    def evict(self, uid: str) -> None:
        current = self.engines[0].answer(uid)[0]
        if current is None or not current.deleted:
            self.pool.evict(group_name(uid))

    @rule(uid=st.sampled_from(USERS), at=st.sampled_from([30, 70, 100]))
    def tear(self, uid: str, at: int) -> None:
        """A writer died while he replaced the record."""
        current = self.engines[0].answer(uid)[0]
        if current is not None and not current.deleted:
            data = self.pool.objects[record_key(uid)]
            self.pool.objects[record_key(uid)] = data[:at] + bytes(255 - byte for byte in data[at:])
            self.leaked |= self.engines[0].keys(uid, current.extents)

    @rule(every=st.integers(1, 5))
    def lease(self, every: int) -> None:
        self.pool.leased = {key for key in list(self.pool.objects)[::every] if "kv_cache" in key}

    @rule(seconds=st.sampled_from([0.5, 5.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.pool.leased = set()
        self.clock.now += seconds
        for engine in self.engines:
            engine.monotonic.now += seconds
            for worker in engine.workers:
                worker.sweep()

    @invariant()
    def both_engines_load_the_same_and_right_bytes(self) -> None:
        for uid in USERS:
            assert self.engines[0].load(uid) == self.engines[1].load(uid)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.open:
            self.commit(0)
        self.pool.leased = set()
        for engine in self.engines:
            engine.monotonic.now += 31.0
            assert [worker.sweep() for worker in engine.workers] == [0, 0]
        expected = set(self.leaked)
        for uid in USERS:
            record = stored(self.pool, uid)
            expected |= {record_key(uid)} | (self.engines[0].keys(uid, record.extents) if record else set())
        assert self.pool.objects.keys() <= expected, "something leaks"


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
