"""What the user cache reports to the pool."""

from typing import Protocol

from userkv.cache.block_table import UserEntry
from userkv.core.request import UserKey


class UserCacheListener(Protocol):
    """Learns what happens to histories in HBM. Called on the scheduler's thread."""

    def on_history_cached(self, request_id: str, key: UserKey, entry: UserEntry) -> None:
        """A request has computed its whole history, which is in the table now."""

    def on_request_stopped(self, request_id: str) -> None:
        """A request ends, is aborted or preempted; if its history was to be kept, it has been."""

    def on_cache_reset(self) -> None:
        """All users were forgotten, because their KV is not valid any more."""


class NoListener:
    """In place of a pool, where there is none."""

    def on_history_cached(self, request_id: str, key: UserKey, entry: UserEntry) -> None: ...

    def on_request_stopped(self, request_id: str) -> None: ...

    def on_cache_reset(self) -> None: ...
