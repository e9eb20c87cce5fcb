"""Deleting users from a pool, and objects that do not go at once."""

import pytest

from tests.support.faulty_backend import Lose, Raise
from tests.support.user_pool import LAYERS, NAMESPACE, UserBench, begin, record_key
from userkv.store.backend import ObjectMissingError, PoolFullError, PoolUnavailableError
from userkv.store.removals import PendingRemovals


def test_a_deletion_takes_the_objects_of_all_workers_and_proves_it() -> None:
    bench = UserBench(LAYERS)
    report = bench.store.delete("u", NAMESPACE)
    assert report.complete
    assert report.found
    assert report.extents == bench.extents
    assert bench.memory.objects.keys() == {record_key("u")}
    again = bench.store.delete("u", NAMESPACE)
    assert again.complete
    assert not again.found
    nobody = bench.store.delete("nobody", NAMESPACE)
    assert nobody.complete
    assert not nobody.found


def test_a_deletion_under_leases() -> None:
    bench = UserBench()
    leased = sorted(bench.keys())[:2]
    bench.memory.leased = set(leased)
    report = bench.store.delete("u", NAMESPACE)
    assert report.tombstone
    assert sorted(report.remaining) == leased
    assert not report.complete
    assert bench.engine.load("u") == []
    again = bench.store.delete("u", NAMESPACE)
    assert sorted(again.remaining) == leased
    bench.memory.leased = set()
    assert bench.store.sweep() == 2, "it is tried again after a pause only"
    bench.engine.monotonic.now += 31
    assert bench.store.sweep() == 0
    assert bench.store.delete("u", NAMESPACE).complete
    assert bench.memory.objects.keys() == {record_key("u")}


def test_a_deletion_does_not_believe_that_objects_are_gone() -> None:
    bench = UserBench()
    remove = bench.memory.remove
    bench.memory.remove = lambda user, keys: []  # type: ignore[method-assign]
    report = bench.store.delete("u", NAMESPACE)
    assert set(report.remaining) == bench.keys()
    bench.memory.remove = remove  # type: ignore[method-assign]
    assert bench.store.delete("u", NAMESPACE).complete


def test_a_deletion_in_a_full_pool_removes_the_record() -> None:
    bench = UserBench()
    bench.faulty.always(Raise(PoolFullError), "put_record")
    report = bench.store.delete("u", NAMESPACE)
    assert not report.tombstone
    assert not report.complete
    assert report.remaining == ()
    assert bench.memory.objects == {}


def test_a_deletion_whose_tombstone_was_overwritten_starts_again() -> None:
    bench = UserBench()
    save = begin(bench, [7, 7, 7])
    data = save.plan.record.encode("u", NAMESPACE)
    put_record, overwritten = bench.memory.put_record, []

    def put_and_overwrite(user: str, key: str, tombstone: bytes) -> None:
        put_record(user, key, tombstone)
        if not overwritten:
            overwritten.append(True)
            put_record(user, key, data)

    bench.memory.put_record = put_and_overwrite  # type: ignore[method-assign]
    report = bench.store.delete("u", NAMESPACE)
    assert report.complete
    assert set(report.extents) == {*bench.extents, *save.plan.new_extents}
    assert bench.memory.objects.keys() == {record_key("u")}


def test_a_tombstone_that_does_not_stay_is_not_reported() -> None:
    bench = UserBench()
    bench.faulty.always(Lose(), "put_record")
    report = bench.store.delete("u", NAMESPACE)
    assert not report.tombstone
    assert report.found


def test_a_deletion_says_what_it_could_not_read() -> None:
    bench = UserBench()
    bench.memory.objects[record_key("u")] = bytes(1024)
    report = bench.store.delete("u", NAMESPACE)
    assert report.found
    assert report.tombstone
    assert report.unreadable
    assert not report.complete
    assert report.remaining == ()


def test_a_deletion_without_an_answer_is_an_error() -> None:
    bench = UserBench()
    bench.faulty.plan("put_record", Raise(PoolUnavailableError))
    with pytest.raises(PoolUnavailableError):
        bench.store.delete("u", NAMESPACE)
    assert bench.engine.load("u") == list(range(8))
    bench.faulty.plan("remove", Raise(PoolUnavailableError))
    report = bench.store.delete("u", NAMESPACE)
    assert report.tombstone
    assert set(report.remaining) == bench.keys()


def test_removals_are_tried_again_with_growing_pauses() -> None:
    bench = UserBench()
    bench.memory.leased = bench.keys()
    assert bench.store.remove_extents("u", NAMESPACE, bench.extents) == list(bench.extents)
    before = bench.faulty.calls["remove"]
    for _ in range(100):
        bench.engine.monotonic.now += 1
        assert bench.store.sweep() == 2
    assert bench.faulty.calls["remove"] - before == 7, "after 1, 3, 7, 15, 31, 61 and 91 seconds"
    bench.memory.leased = set()
    bench.engine.monotonic.now += 31
    assert bench.store.sweep() == 0
    assert bench.store.statistics()["pending_removals"] == 0
    assert bench.store.remove_extents("u", NAMESPACE, bench.extents) == []


def test_removals_without_an_answer_are_tried_again() -> None:
    bench = UserBench()
    bench.faulty.always(Raise(PoolUnavailableError), "remove")
    assert bench.store.remove_extents("u", NAMESPACE, bench.extents) == list(bench.extents)
    bench.engine.monotonic.now += 2
    assert bench.store.sweep() == 2
    bench.faulty.clear()
    assert bench.store.sweep() == 0
    with pytest.raises(ObjectMissingError):
        bench.store.get_extent("u", NAMESPACE, bench.extents[0], [])


def test_pending_removals_are_bounded() -> None:
    bench = UserBench()
    removals = PendingRemovals(bench.memory, bench.engine.monotonic, limit=3)
    bench.memory.leased = bench.keys()
    assert len(removals.remove("u", sorted(bench.keys()))) == 4
    assert len(removals) == 3
    assert removals.dropped == 1
