"""The user cache's figures on vLLM's own ``/metrics``.

The cache lives in the engine's process and Prometheus in the API server's. vLLM ships ``SchedulerStats`` from one to
the other after each step. Its ``kv_connector_stats`` is the only free-form field. So a snapshot travels in it under a
key of its own, and is taken out again before vLLM's loggers read the rest.
"""

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.stats import SchedulerStats

from userkv.cache.user_cache import UserCache

_KEY = "userkv"
_LABELS = ("model_name", "engine")

_COUNTERS = {
    "user_hits": "Requests that started with history tokens of their user from HBM.",
    "user_misses": "Requests that started with none although they asked for them.",
    "hit_tokens": "History tokens taken from HBM.",
    "history_tokens": "History tokens of all requests that started; each request counts once.",
    "lru_evictions": "Users evicted from HBM.",
    "evicted_blocks": "KV blocks released by evictions.",
    "single_flight_waits": "Requests that waited while another one computed the same history.",
    "single_flight_timeouts": "Requests that gave up waiting and computed the history themselves.",
}
_GAUGES = {
    "users": "Users whose history is in HBM.",
    "blocks": "KV blocks that hold users' histories.",
    "prefix_share_blocks": "KV blocks that are to be free of users, for the prefixes of requests without a user.",
}


Sizes = tuple[int, int, int]
"""Users whose history is in HBM, KV blocks that hold it, and those kept free of users for ordinary prefixes."""


def attach_snapshot(stats: SchedulerStats, users: UserCache, known: Sizes) -> Sizes:
    """Put the counts since the last snapshot, and the present sizes, into ``stats``, if anything of it is new.

    In most steps nothing is, and then nothing is sent to the API server. Engine process.

    Args:
        stats: what vLLM sends.
        users: the user cache.
        known: the sizes that were sent last.

    Returns:
        The present sizes.

    """
    counts, sizes = users.stats.take(), (len(users.table), users.table.num_blocks, users.share.blocks)
    if sizes != known or any(counts.values()):
        snapshot = {**counts, **dict(zip(_GAUGES, sizes, strict=True))}
        stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: snapshot}
    return sizes


def detach_snapshot(stats: SchedulerStats | None) -> dict[str, int] | None:
    """Take a snapshot out of ``stats`` again, leaving what a connector put there. API server process."""
    payload = stats.kv_connector_stats if stats is not None else None
    if stats is None or not payload or _KEY not in payload:
        return None
    rest = {key: value for key, value in payload.items() if key != _KEY}
    stats.kv_connector_stats = rest or None
    snapshot: dict[str, int] = payload[_KEY]
    return snapshot


def observe(snapshot: dict[str, int], model_name: str, engine_index: int) -> None:
    """Add a snapshot to the Prometheus metrics of this process."""
    for name, metric in _metrics().items():
        labelled = metric.labels(model_name, str(engine_index))
        if name in _COUNTERS:
            labelled.inc(snapshot[name])
        else:
            labelled.set(snapshot[name])


@cache
def _metrics() -> dict[str, Any]:
    counters = {name: Counter(f"userkv_{name}", text, _LABELS) for name, text in _COUNTERS.items()}
    gauges = {
        name: Gauge(f"userkv_{name}", text, _LABELS, multiprocess_mode="mostrecent") for name, text in _GAUGES.items()
    }
    return counters | gauges
