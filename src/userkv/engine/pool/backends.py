"""From the connector's settings to a pool backend behind a circuit breaker."""

from pathlib import Path

from userkv.core.breaker import CircuitBreaker
from userkv.core.pool_settings import PoolSettings
from userkv.store.backend import PoolBackend
from userkv.store.guarded import GuardedBackend


def open_backend(settings: PoolSettings, world_size: int, rank: int) -> GuardedBackend:
    """Open the pool for one worker. Workers of the local backend share the budgets and have directories of their own.

    Raises:
        InvalidSettingError: it cannot be opened like this; the message says what to change.

    """
    return GuardedBackend(_open(settings, world_size, rank), CircuitBreaker())


def local_directory(settings: PoolSettings, rank: int) -> Path | None:
    """The directory of a worker's SSD tier."""
    return Path(settings.local_dir).expanduser() / f"rank-{rank}" if settings.local_dir else None


def _open(settings: PoolSettings, world_size: int, rank: int) -> PoolBackend:
    # Late: Mooncake's libraries are large, and not installed everywhere.
    if settings.backend == "mooncake":
        from userkv.store.mooncake.backend import MooncakeBackend
        from userkv.store.mooncake.config import MooncakeConfig

        return MooncakeBackend(MooncakeConfig.load(settings.mooncake))
    from userkv.store.local.backend import LocalBackend

    return LocalBackend(
        dram_bytes=settings.local_dram_bytes // world_size,
        directory=local_directory(settings, rank),
        ssd_bytes=settings.local_ssd_bytes // world_size,
    )
