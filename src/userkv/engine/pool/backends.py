"""From the connector's settings to a pool backend behind a circuit breaker."""

from pathlib import Path

import psutil

from userkv.cache.policies import LRU
from userkv.cache.settings import CacheSettings
from userkv.core.errors import InvalidOptionError
from userkv.core.pool_settings import PoolSettings
from userkv.store.backend import PoolBackend
from userkv.store.breaker import CircuitBreaker
from userkv.store.guarded import GuardedBackend
from userkv.store.local import LocalBackend, check_directory


def open_backend(settings: PoolSettings, world_size: int, rank: int) -> GuardedBackend:
    """Open the pool for one worker. Workers of the local backend share the budgets and have directories of their own.

    Raises:
        InvalidOptionError: it cannot be opened like this; the message says what to change.

    """
    return GuardedBackend(_open(settings, world_size, rank), CircuitBreaker())


def check_backend(settings: PoolSettings, world_size: int) -> None:
    """Find out before any process starts what :func:`open_backend` would refuse in a worker.

    Raises:
        InvalidOptionError: see there.

    """
    if settings.backend == "mooncake":
        from userkv.store.mooncake.config import MooncakeConfig

        MooncakeConfig.load(settings.mooncake)
        return
    memory = psutil.virtual_memory().total
    if settings.local_dram_bytes > memory:
        raise InvalidOptionError(
            "local_dram_bytes", f"is {settings.local_dram_bytes}, more than this machine has ({memory}); lower it"
        )
    for rank in range(world_size):
        directory = local_directory(settings, rank)
        if directory is not None and settings.local_ssd_bytes:
            check_directory(directory)


def local_directory(settings: PoolSettings, rank: int) -> Path | None:
    """The directory of a worker's SSD tier."""
    return Path(settings.local_dir).expanduser() / f"rank-{rank}" if settings.local_dir else None


def _open(settings: PoolSettings, world_size: int, rank: int) -> PoolBackend:
    # Late: Mooncake's libraries are large, and not installed everywhere.
    if settings.backend == "mooncake":
        from userkv.store.mooncake.backend import MooncakeBackend
        from userkv.store.mooncake.config import MooncakeConfig

        return MooncakeBackend(MooncakeConfig.load(settings.mooncake, rank if world_size > 1 else None))
    return LocalBackend(
        dram_bytes=settings.local_dram_bytes // world_size,
        directory=local_directory(settings, rank) if settings.local_ssd_bytes else None,
        ssd_bytes=settings.local_ssd_bytes // world_size,
        # Only worker 0 sees requests for users that the pool does not hold, and all workers must evict the same users.
        policy=CacheSettings.from_env().policy if world_size == 1 else LRU,
    )
