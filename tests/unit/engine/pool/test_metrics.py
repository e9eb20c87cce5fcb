"""The pool's figures, from workers and scheduler to ``/metrics``."""

import functools
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.support.faulty_backend import FaultyBackend, Raise
from tests.support.memory_backend import MemoryBackend
from userkv.engine.pool.metrics import COUNTERS, GAUGES, HISTOGRAMS, PoolPromMetrics, PoolStats
from userkv.engine.pool.worker import backend_gauges as gauges
from userkv.engine.pool.worker.backend_gauges import PoolGauges
from userkv.store.backend import PoolUnavailableError
from userkv.store.breaker import CircuitBreaker
from userkv.store.guarded import GuardedBackend


class Metrics:
    """Metrics in a registry of their own."""

    def __init__(self, *engines: int) -> None:
        self.registry = CollectorRegistry()
        types = {kind: functools.partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        values = {engine: ["model", str(engine)] for engine in engines or (0,)}
        config = SimpleNamespace(kv_transfer_config=None)
        self._make = lambda: PoolPromMetrics(config, types, ["model_name", "engine"], values)
        self.prom = self._make()

    def again(self) -> PoolPromMetrics:
        """Another engine in this process."""
        return self._make()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "model", "engine": "0"} | labels)


def stats_of(**counts: int) -> PoolStats:
    stats = PoolStats()
    stats.count(**counts)
    return stats


def test_counts_observations_and_gauges() -> None:
    stats = PoolStats()
    assert stats.is_empty()
    stats.count(swapin_attempts=2, failed_saves=1)
    stats.count(swapin_attempts=1)
    stats.observe(load_bytes=5, load_seconds=0.5)
    stats.observe(load_bytes=7)
    stats.set(pool_save_queue=3)
    stats.set(pool_save_queue=1, pool_load_queue=0)
    assert not stats.is_empty()
    assert stats.data == {
        "counts": {"swapin_attempts": 3, "failed_saves": 1},
        "observations": {"load_bytes": [5, 7], "load_seconds": [0.5]},
        "gauges": {"pool_save_queue": 1, "pool_load_queue": 0},
    }
    assert stats.reduce() == {"swapin_attempts": 3, "failed_saves": 1}
    stats.reset()
    assert stats.is_empty()
    assert PoolStats().data == {}


AMOUNTS = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9))
DATA = st.fixed_dictionaries(
    {},
    optional={
        "counts": AMOUNTS,
        "gauges": AMOUNTS,
        "observations": st.dictionaries(st.sampled_from(["a", "b"]), st.lists(st.integers(0, 9), max_size=3)),
    },
)


@given(st.lists(DATA, min_size=1, max_size=4))
def test_what_several_ranks_report_is_added_up(reports: list[dict[str, dict[str, Any]]]) -> None:
    originals = pickle.loads(pickle.dumps(reports))
    total = PoolStats()
    for report in reports:
        assert total.aggregate(PoolStats(data=report)) is total
    for kind in ("counts", "gauges"):
        for name in "ab":
            expected = sum(report.get(kind, {}).get(name, 0) for report in originals)
            assert total.data.get(kind, {}).get(name, 0) == expected
    for name in "ab":
        expected = [value for report in originals for value in report.get("observations", {}).get(name, [])]
        assert total.data.get("observations", {}).get(name, []) == expected
    assert reports == originals


def test_reports_travel_between_processes() -> None:
    stats = stats_of(swapin_attempts=True)
    stats.set(pool_breaker_open=True)
    stats.observe(load_seconds=0.1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())) == stats.data
    assert pickle.loads(pickle.dumps(stats)).data == stats.data


def test_the_documented_names() -> None:
    metrics = Metrics()
    names = {family.name for family in metrics.registry.collect()}
    assert names == {
        "userkv_pool_lookups",
        "userkv_swapin_attempts",
        "userkv_swapin_successes",
        "userkv_swapin_tokens",
        "userkv_pool_saves",
        "userkv_pool_evictions",
        "userkv_pool_corrupt_objects",
        "userkv_pool_ssd_errors",
        "userkv_pool_breaker_openings",
        "userkv_pool_queue",
        "userkv_pool_breaker_open",
        "userkv_pool_used_bytes",
        "userkv_pool_budget_bytes",
        "userkv_pool_load_bytes",
        "userkv_pool_load_seconds",
        "userkv_pool_save_bytes",
        "userkv_pool_save_seconds",
    }
    assert all(family.documentation.endswith(".") for family in metrics.registry.collect())
    assert b'userkv_pool_saves_total{engine="0",model_name="model",result="committed"} 0.0' in generate_latest(
        metrics.registry
    )


def test_every_figure_has_a_place() -> None:
    metrics = Metrics()
    stats = stats_of(**dict.fromkeys(COUNTERS, 2))
    stats.set(**dict.fromkeys(GAUGES, 3.0))
    stats.observe(**dict.fromkeys(HISTOGRAMS, 1.0))
    metrics.prom.observe(stats.data)
    metrics.prom.observe(stats.data)
    assert metrics.value("userkv_pool_saves_total", result="committed") == 4
    assert metrics.value("userkv_pool_saves_total", result="dropped") == 4
    assert metrics.value("userkv_pool_lookups_total", result="ssd") == 4
    assert metrics.value("userkv_swapin_attempts_total") == 4
    assert metrics.value("userkv_swapin_tokens_total", tier="ssd") == 4
    assert metrics.value("userkv_pool_evictions_total", tier="dram") == 4
    assert metrics.value("userkv_pool_used_bytes", tier="ssd") == 3
    assert metrics.value("userkv_pool_queue", kind="save") == 3
    assert metrics.value("userkv_pool_breaker_open") == 3
    assert metrics.value("userkv_pool_load_seconds_count") == 2
    assert metrics.value("userkv_pool_save_bytes_sum") == 2
    values = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert not any(sample.value == 0 for sample in values if not sample.name.endswith(("_bucket", "_created")))


def test_each_engine_has_its_own() -> None:
    metrics = Metrics(0, 1)
    metrics.prom.observe(stats_of(swapin_attempts=1).data, 1)
    assert metrics.value("userkv_swapin_attempts_total", engine="0") == 0
    assert metrics.value("userkv_swapin_attempts_total", engine="1") == 1


def test_a_second_engine_in_the_process_goes_on_counting() -> None:
    metrics = Metrics()
    metrics.prom.observe(stats_of(swapin_attempts=1).data)
    metrics.again().observe(stats_of(swapin_attempts=1).data)
    assert metrics.value("userkv_swapin_attempts_total") == 2


def test_nothing_to_report() -> None:
    metrics = Metrics()
    metrics.prom.observe({})
    assert metrics.value("userkv_swapin_attempts_total") == 0


def test_buckets_fit_what_is_measured() -> None:
    """From a block of a small model to gigabytes, and from half a millisecond to some seconds."""
    for name, (_, _, buckets) in HISTOGRAMS.items():
        assert list(buckets) == sorted(set(buckets))
        smallest, largest = (4096, 1 << 32) if "bytes" in name else (0.0005, 4)
        assert buckets[0] <= smallest
        assert buckets[-1] >= largest


class TestGauges:
    """What a worker's backend says of itself."""

    def make(self) -> tuple[FaultyBackend, GuardedBackend, PoolGauges, list[float]]:
        now = [100.0]
        faulty = FaultyBackend(MemoryBackend())
        guarded = GuardedBackend(faulty, CircuitBreaker(failures=1))
        return faulty, guarded, PoolGauges(guarded, lambda: now[0]), now

    def test_growth_since_the_last_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, guarded, source, now = self.make()
        counters = {"dram_evictions": 3, "ssd_write_errors": 1, "ssd_read_errors": 2, "promotions": 9}
        monkeypatch.setattr(guarded, "counters", lambda: dict(counters))
        stats = PoolStats()
        source.add_to(stats)
        assert stats.data["counts"] == {"pool_evictions_dram": 3, "pool_ssd_errors": 3}
        counters["dram_evictions"] += 2
        soon = PoolStats()
        source.add_to(soon)  # Present values are always there: ranks are added up.
        assert "counts" not in soon.data
        assert soon.data["gauges"] == stats.data["gauges"] != {}
        now[0] += gauges.SECONDS
        source.add_to(stats)
        assert stats.data["counts"] == {"pool_evictions_dram": 5, "pool_ssd_errors": 3}

    def test_a_pool_that_does_not_answer(self) -> None:
        faulty, guarded, source, now = self.make()
        stats = PoolStats()
        source.add_to(stats)
        assert stats.data["gauges"] == {"pool_breaker_open": 0, "pool_used_dram": 0, "pool_budget_dram": 0}
        faulty.always(Raise(PoolUnavailableError))
        with pytest.raises(PoolUnavailableError):
            guarded.get_record("u", "r")
        now[0] += gauges.SECONDS
        later = PoolStats()
        source.add_to(later)
        assert later.data["gauges"] == {"pool_breaker_open": 1}
        assert later.data["counts"] == {"pool_breaker_openings": 1}

    def test_all_of_it_has_a_metric(self) -> None:
        assert set(gauges._COUNTERS.values()) <= COUNTERS.keys()
