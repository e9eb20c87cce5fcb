"""Counters of the user cache, in the field's names."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class UserCacheStats:
    """What happened since the last :meth:`take`. Not thread-safe: the scheduler thread owns it.

    A request counts once, when it starts first: not again after a preemption, or after a load that failed.

    Attributes:
        user_hits: requests that started with at least one history token from HBM.
        user_misses: requests that started with none although they may read.
        hit_tokens: history tokens taken from HBM.
        history_tokens: history tokens of all requests that started (the most that could have been hit).
        lru_evictions: users evicted.
        evicted_blocks: KV blocks released by evictions.
        single_flight_waits: requests that waited for another request to compute the same history.
        single_flight_timeouts: those of them that gave up waiting and computed it themselves.

    """

    user_hits: int = 0
    user_misses: int = 0
    hit_tokens: int = 0
    history_tokens: int = 0
    lru_evictions: int = 0
    evicted_blocks: int = 0
    single_flight_waits: int = 0
    single_flight_timeouts: int = 0

    def take(self) -> dict[str, int]:
        """The counts by name; all start again at zero."""
        counts = {name: getattr(self, name) for name in _NAMES}
        if any(counts.values()):
            for name in _NAMES:
                setattr(self, name, 0)
        return counts


# A constant, since take() runs in every step of the engine.
_NAMES = tuple(field.name for field in fields(UserCacheStats))
