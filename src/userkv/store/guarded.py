"""A backend behind a circuit breaker, so that a pool that is down costs time only now and then."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from userkv.store.backend import (
    PoolBackend,
    PoolUnavailableError,
    Region,
    StoreError,
    Tier,
    TierUsage,
)
from userkv.store.breaker import CircuitBreaker

T = TypeVar("T")


class GuardedBackend(PoolBackend):
    """Passes calls on while the pool answers; refuses them at once while the breaker is open.

    Only :class:`PoolUnavailableError` is a failure. A missing or corrupt object and a full pool are answers.

    Args:
        backend: whose calls to guard; closing this one closes it.
        breaker: with the state to consult and to keep.

    """

    def __init__(self, backend: PoolBackend, breaker: CircuitBreaker) -> None:
        self.breaker = breaker
        self._backend = backend

    @property
    def parallel_gets(self) -> int:
        return self._backend.parallel_gets

    def register(self, regions: Sequence[Region]) -> None:
        self._guard(lambda: self._backend.register(regions))

    def count_request(self, user: str) -> None:
        self._backend.count_request(user)

    def put(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        return self._guard(lambda: self._backend.put(user, key, parts))

    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        return self._guard(lambda: self._backend.get(user, key, parts))

    def locate(self, user: str, keys: Sequence[str]) -> list[Tier | None]:
        return self._guard(lambda: self._backend.locate(user, keys))

    def put_record(self, user: str, key: str, data: bytes) -> None:
        self._guard(lambda: self._backend.put_record(user, key, data))

    def get_record(self, user: str, key: str) -> bytes | None:
        return self._guard(lambda: self._backend.get_record(user, key))

    def remove(self, user: str, keys: Sequence[str]) -> list[str]:
        return self._guard(lambda: self._backend.remove(user, keys))

    def usage(self) -> list[TierUsage]:
        return self._backend.usage()

    def counters(self) -> dict[str, int]:
        return {**self._backend.counters(), "breaker_openings": self.breaker.opened}

    def close(self) -> None:
        self._backend.close()

    def _guard(self, call: Callable[[], T]) -> T:
        if not self.breaker.allow():
            raise PoolUnavailableError("the pool has failed repeatedly and the circuit breaker is open; check the pool")
        try:
            result = call()
        except PoolUnavailableError:
            self.breaker.failure()
            raise
        except StoreError:
            self.breaker.success()
            raise
        self.breaker.success()
        return result
