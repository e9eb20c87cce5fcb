"""Look-ups and commits of users in a pool, case by case; ``test_user_store_model.py`` puts them together."""

import threading

import pytest

from tests.support.faulty_backend import Raise, Slow, Tear
from tests.support.user_pool import LAYERS, NAMESPACE, Save, UserBench, begin, group_name, record_key, stored
from userkv.records.record import Extent, UserRecord
from userkv.store.backend import PoolFullError, Tier


def test_the_documented_keys() -> None:
    bench = UserBench()
    assert bench.memory.objects.keys() == {record_key("u"), *bench.keys()}
    assert bench.store.keys_of("u@n", NAMESPACE, Extent(255, 0, 1)) == ["u%40n@model%2Fv1@2@0@kv_cache@xff"]
    assert set(bench.memory.owner.values()) == {group_name("u")}


def test_the_pool_is_told_of_requests_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = UserBench()
    noted: list[str] = []
    monkeypatch.setattr(bench.memory, "count_request", noted.append)
    assert bench.engine.save("u", [1, 2, 3])
    assert bench.engine.load("u") == [1, 2, 3]
    bench.store.delete("u", NAMESPACE)
    assert noted == []
    bench.store.count_request("u", NAMESPACE)
    assert noted == [group_name("u")]


def test_one_object_per_layer_and_the_slowest_tier_counts() -> None:
    bench = UserBench(LAYERS)
    worker = bench.engine.workers[1]
    keys = worker.keys_of("u", NAMESPACE, bench.extents[0])
    assert keys == ["u@model%2Fv1@2@1@kv_cache@0@x1", "u@model%2Fv1@2@1@kv_cache@1@x1"]
    assert worker.present("u", NAMESPACE, bench.extents) == [Tier.DRAM, Tier.DRAM]
    bench.memory.on_ssd.add(keys[0])
    assert worker.present("u", NAMESPACE, bench.extents) == [Tier.SSD, Tier.DRAM]
    del bench.memory.objects[keys[1]]
    assert worker.present("u", NAMESPACE, bench.extents) == [None, Tier.DRAM]
    assert worker.present("u", NAMESPACE, []) == []
    assert bench.engine.load("u") == []


@pytest.mark.parametrize(("num_layers", "layer"), [(0, 0), (2, None)])
def test_a_layer_is_named_in_layerwise_mode_and_only_then(num_layers: int, layer: int | None) -> None:
    bench = UserBench(num_layers)
    with pytest.raises(ValueError, match="layerwise"):
        bench.store.put_extent("u", NAMESPACE, Extent(99, 0, 1), [], layer)
    with pytest.raises(ValueError, match="layerwise"):
        bench.store.get_extent("u", NAMESPACE, Extent(99, 0, 1), [], layer)


def test_a_record_that_is_torn_for_a_moment() -> None:
    bench = UserBench()
    bench.faulty.plan("get_record", Tear(), Tear())
    assert bench.store.lookup("u", NAMESPACE) == bench.record
    assert bench.store.statistics()["torn_records"] == 2


def test_a_record_that_stays_torn_is_a_miss_and_can_be_replaced() -> None:
    bench = UserBench()
    data = bench.memory.objects[record_key("u")]
    bench.memory.objects[record_key("u")] = data[:40] + bytes(len(data) - 40)
    assert bench.store.lookup("u", NAMESPACE) is None
    assert bench.faulty.calls["get_record"] <= 8
    assert bench.engine.save("u", [1, 2, 3])
    assert bench.engine.load("u") == [1, 2, 3]


def test_a_record_of_somebody_else_or_of_another_schema_is_a_miss() -> None:
    bench = UserBench()
    assert bench.record is not None
    for data in (bench.record.encode("v", NAMESPACE), bench.record.encode("u", "other"), b"UKVR\x02", b""):
        bench.memory.objects[record_key("u")] = data.ljust(64, b"\0")
        assert bench.store.lookup("u", NAMESPACE) is None
    assert bench.store.statistics()["unreadable_records"] == 4


def test_expired_records_are_misses_and_are_replaced_whole() -> None:
    bench = UserBench()
    bench.engine.clock.now += 1
    assert bench.engine.save("u", list(range(9)), ttl=10)
    bench.engine.clock.now += 9.9
    assert bench.engine.load("u") == list(range(9))
    bench.engine.clock.now += 0.1
    assert bench.store.lookup("u", NAMESPACE) is None
    assert bench.store.statistics()["expired_records"] == 1
    assert bench.engine.save("u", list(range(9)))
    current = stored(bench.memory, "u")
    assert current is not None
    assert len(bench.memory.objects) == 1 + len(bench.engine.keys("u", current.extents))


def test_a_commit_after_a_deletion_is_refused() -> None:
    bench = UserBench()
    for fresh in (False, True):
        if fresh:
            bench.memory.evict(group_name("u"))
        save = begin(bench, list(range(20)))
        assert (save.base_generation == 0) == fresh
        assert bench.store.delete("u", NAMESPACE).found != fresh
        result = bench.store.commit("u", NAMESPACE, save.plan.record, save.base_generation)
        assert not result.committed
        assert result.garbage == ()
        assert bench.engine.load("u") == []
    assert bench.store.statistics()["refused_commits"] == 2
    assert bench.engine.save("u", [1, 2, 3])
    assert bench.engine.load("u") == [1, 2, 3]


def test_reasons_of_refusals() -> None:
    bench = UserBench()
    first, second, third = (begin(bench, [*range(8), number]) for number in range(3))

    def reason(save: Save) -> str:
        return bench.store.commit("u", NAMESPACE, save.plan.record, save.base_generation).reason

    assert reason(first) == ""
    assert reason(second) == "the user was saved or lost meanwhile"
    bench.memory.objects.pop(bench.store.keys_of("u", NAMESPACE, third.plan.new_extents[0])[0])
    assert reason(third) == "an extent that the record names is gone"
    other = begin(bench, [9, 9, 9])
    lost = bench.memory.objects.pop(record_key("u"))
    assert reason(other) == "the user was saved or lost meanwhile"
    bench.memory.objects[record_key("u")] = lost
    fourth = begin(bench, [*range(8), 3])
    bench.memory.put_record(group_name("u"), record_key("u"), UserRecord.tombstone(5, "w", 1.0).encode("u", NAMESPACE))
    assert reason(fourth) == "the user was deleted meanwhile"


def test_a_record_that_came_back_is_not_taken_for_the_one_before() -> None:
    """Generations grow across evictions, so that a base that is gone is never mistaken for what is there now."""
    bench = UserBench()
    generations = []
    for number in range(3):
        bench.engine.clock.now += 1
        bench.memory.evict(group_name("u"))
        assert bench.engine.save("u", [number] * 3)
        current = bench.engine.answer("u")[0]
        assert current is not None
        generations.append(current.generation)
    assert generations == sorted(set(generations))


def test_a_full_pool_leaves_the_old_record() -> None:
    bench = UserBench()
    save = begin(bench, list(range(20)))
    bench.faulty.plan("put_record", Raise(PoolFullError))
    with pytest.raises(PoolFullError):
        bench.store.commit("u", NAMESPACE, save.plan.record, save.base_generation)
    assert bench.engine.load("u") == list(range(8))


def test_of_many_threads_that_commit_one_user_one_wins() -> None:
    bench = UserBench()
    bench.faulty.always(Slow(0.01), "put_record")
    saves = [begin(bench, [*range(8), number]) for number in range(8)]
    results: list[bool] = []
    threads = [threading.Thread(target=lambda save=save: results.append(bench.engine.commit(save))) for save in saves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == [False] * 7 + [True]
    assert len(bench.engine.load("u")) == 9


def test_statistics_and_usage() -> None:
    bench = UserBench()
    assert bench.store.statistics() == {"commits": 1, "pending_removals": 0, "dropped_removals": 0}
    assert bench.store.usage() == bench.memory.usage()
