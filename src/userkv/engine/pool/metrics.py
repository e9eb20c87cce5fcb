"""The connector's figures, on vLLM's way from workers and scheduler to the API server's ``/metrics``."""

from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "pool_lookups_dram": ("pool_lookups", "dram", "Pool look-ups of requests, by what they found."),
    "pool_lookups_ssd": ("pool_lookups", "ssd", "Pool look-ups of requests, by what they found."),
    "pool_lookups_miss": ("pool_lookups", "miss", "Pool look-ups of requests, by what they found."),
    "pool_lookups_failed": ("pool_lookups", "failed", "Pool look-ups of requests, by what they found."),
    "swapin_attempts": ("swapin_attempts", "", "Requests that started to load history from the pool."),
    "swapin_successes": ("swapin_successes", "", "Requests that loaded all they wanted."),
    "swapin_tokens_dram": ("swapin_tokens", "dram", "History tokens that first starts loaded whole, by tier."),
    "swapin_tokens_ssd": ("swapin_tokens", "ssd", "History tokens that first starts loaded whole, by tier."),
    "committed_saves": ("pool_saves", "committed", "Saves of histories, by how they ended."),
    "unneeded_saves": ("pool_saves", "unneeded", "Saves of histories, by how they ended."),
    "failed_saves": ("pool_saves", "failed", "Saves of histories, by how they ended."),
    "dropped_saves": ("pool_saves", "dropped", "Saves of histories, by how they ended."),
    "pool_evictions_dram": ("pool_evictions", "dram", "Users that the local pool evicted, by tier."),
    "pool_evictions_ssd": ("pool_evictions", "ssd", "Users that the local pool evicted, by tier."),
    "pool_corrupt_objects": ("pool_corrupt_objects", "", "Objects that failed verification and were not used."),
    "pool_ssd_errors": ("pool_ssd_errors", "", "Writes to the SSD tier that failed."),
    "pool_breaker_openings": ("pool_breaker_openings", "", "Times that the circuit breaker opened."),
}
"""Our name -> the metric's name without prefix, the value of its label, its help."""

GAUGES = {
    "pool_load_queue": ("pool_queue", "load", "Jobs that wait for a transfer thread."),
    "pool_save_queue": ("pool_queue", "save", "Jobs that wait for a transfer thread."),
    "pool_breaker_open": ("pool_breaker_open", "", "Ranks whose circuit breaker keeps them from the pool."),
    "pool_used_dram": ("pool_used_bytes", "dram", "Bytes in the pool, as far as this engine knows."),
    "pool_used_ssd": ("pool_used_bytes", "ssd", "Bytes in the pool, as far as this engine knows."),
    "pool_budget_dram": ("pool_budget_bytes", "dram", "Bytes that the pool may take."),
    "pool_budget_ssd": ("pool_budget_bytes", "ssd", "Bytes that the pool may take."),
}

HISTOGRAMS = {
    "load_bytes": ("pool_load_bytes", "Bytes of a load on one rank.", tuple(float(4**i) for i in range(6, 17))),
    "load_seconds": ("pool_load_seconds", "Duration of a load on one rank.", tuple(0.0005 * 2**i for i in range(14))),
    "save_bytes": ("pool_save_bytes", "Bytes of a save on one rank.", tuple(float(4**i) for i in range(6, 17))),
    "save_seconds": ("pool_save_seconds", "Duration of a save on one rank.", tuple(0.0005 * 2**i for i in range(14))),
}

_LABELS = {
    "pool_lookups": "result",
    "swapin_tokens": "tier",
    "pool_saves": "result",
    "pool_evictions": "tier",
    "pool_queue": "kind",
    "pool_used_bytes": "tier",
    "pool_budget_bytes": "tier",
}


class PoolStats(KVConnectorStats):
    """Counts and observations since the last report, and present values; what several ranks report is added up."""

    def count(self, **amounts: int) -> None:
        """Add to counters."""
        self._add("counts", amounts)

    def observe(self, **values: float) -> None:
        """Note one value for each of some histograms."""
        observations = self.data.setdefault("observations", {})
        for name, value in values.items():
            observations.setdefault(name, []).append(value)

    def set(self, **values: float) -> None:
        """Set gauges."""
        self.data.setdefault("gauges", {}).update(values)

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "PoolStats":
        self._add("counts", other.data.get("counts", {}))
        self._add("gauges", other.data.get("gauges", {}))
        observations = self.data.setdefault("observations", {})
        for name, values in other.data.get("observations", {}).items():
            observations.setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows: the counts."""
        return dict(self.data.get("counts", {}))

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def _add(self, kind: str, amounts: dict[str, Any]) -> None:
        present = self.data.setdefault(kind, {})
        for name, amount in amounts.items():
            present[name] = present.get(name, 0) + amount


class PoolPromMetrics(KVConnectorPromMetrics):
    """``userkv_*`` metrics of the pool in the API server's process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        labels = tuple(self._labelnames)
        families = _families(self._counter_cls, self._gauge_cls, self._histogram_cls, labels)
        self._metrics = {
            ours: {
                engine: families[name].labels(*values, *([label] if label else []))
                for engine, values in self.per_engine_labelvalues.items()
            }
            for ours, (name, label) in _NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.get("counts", {}).items():
            self._metrics[name][engine_idx].inc(amount)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._metrics[name][engine_idx].set(value)
        for name, values in transfer_stats_data.get("observations", {}).items():
            for value in values:
                self._metrics[name][engine_idx].observe(value)


_NAMES = {
    **{ours: (name, label) for ours, (name, label, _) in (COUNTERS | GAUGES).items()},
    **{ours: (name, "") for ours, (name, _, _) in HISTOGRAMS.items()},
}


@cache
def _families(counter: Any, gauge: Any, histogram: Any, labels: tuple[str, ...]) -> dict[str, Any]:
    """The metrics by name; made once per process, which may have several engines one after the other."""
    families: dict[str, Any] = {}
    for make, table, extra in ((counter, COUNTERS, {}), (gauge, GAUGES, {"multiprocess_mode": "mostrecent"})):
        for name, label, text in table.values():
            if name not in families:
                families[name] = make(f"userkv_{name}", text, [*labels, *([_LABELS[name]] if label else [])], **extra)
    for name, text, buckets in HISTOGRAMS.values():
        families[name] = histogram(f"userkv_{name}", text, labels, buckets=buckets)
    return families
