"""Where the tokens of users' histories came from, as the server's own metrics count them.

An answer tells how many tokens did not have to be computed, but not who had them. The engine does: ``userkv_*`` on its
metrics page, sent with its steps. The counters run from the server's start and count everybody's requests, so a run is
the difference of two readings, and of this run alone only if nobody else uses the server meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

PREFIX = "userkv_"
"""How the names of all metrics read here begin."""

_SOURCES = {
    (f"{PREFIX}hit_tokens_total", ""): "hbm",
    (f"{PREFIX}swapin_tokens_total", "dram"): "dram",
    (f"{PREFIX}swapin_tokens_total", "ssd"): "ssd",
    (f"{PREFIX}history_tokens_total", ""): "history",
}
"""Name of the metric, value of its label ``tier`` -> what it counts."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """History tokens of requests that named a user and might read his KV, by where they came from.

    hbm: the engine's own KV cache. dram, ssd: the pool's tiers. computed: none of them. history: all.
    """

    hbm: int = 0
    dram: int = 0
    ssd: int = 0
    computed: int = 0
    history: int = 0

    def since(self, before: Tiers) -> Tiers | None:
        """What has been counted since an earlier reading.

        None if that is nothing, or if the counters began anew (the server was restarted).
        """
        grown = {name: getattr(self, name) - getattr(before, name) for name in _SOURCES.values()}
        return _tiers(grown) if grown["history"] and min(grown.values()) >= 0 else None


def read_tiers(families: Iterable[Metric]) -> Tiers:
    """The tiers among metrics, over all engines; all 0 where there are none (plain vLLM, or nothing asked yet)."""
    counts: Counter[str] = Counter()
    for family in families:
        for sample in family.samples:
            source = _SOURCES.get((sample.name, sample.labels.get("tier", "")))
            if source is not None:
                counts[source] += int(sample.value)
    return _tiers(counts)


def _tiers(counts: dict[str, int]) -> Tiers:
    hbm, dram, ssd, history = (counts.get(name, 0) for name in ("hbm", "dram", "ssd", "history"))
    # A request is counted when it starts and a load when it ends, so a reading in between can make the rest negative.
    return Tiers(hbm, dram, ssd, max(0, history - hbm - dram - ssd), history)
