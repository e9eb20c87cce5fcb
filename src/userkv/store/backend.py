"""The contract of pool backends.

A backend keeps *objects*, named by keys, that belong to *users*: extents, which are written once under a key that is
never reused, and records, which are small and replaced. It knows nothing of tokens, blocks or layers. The contract's
tests (``tests/unit/store/test_backend_contract.py``) run over every backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from userkv.core.errors import UserKVError


class Region(NamedTuple):
    """A piece of host memory (or of device memory that the transport can reach): where KV lies or shall lie."""

    address: int
    nbytes: int


class Tier(StrEnum):
    """Where an object lies."""

    DRAM = "dram"
    SSD = "ssd"


class TierUsage(NamedTuple):
    """Bytes that objects take in a tier, and its budget; a budget that nobody knows is 0."""

    tier: Tier
    used: int
    budget: int


class StoreError(UserKVError):
    """An operation on the pool did not do what it should. The caller counts it and goes on without the pool."""


class ObjectMissingError(StoreError):
    """The object does not exist: never written, evicted or removed. No sign of trouble."""


class ObjectCorruptError(StoreError):
    """What is there is not what was written: wrong bytes, another object's, or too few. Nothing was delivered."""


class PoolFullError(StoreError):
    """There is no room for the object, although what may be evicted was."""


class PoolUnavailableError(StoreError):
    """The pool, or the part of it that has the object, does not answer, answers with an error, or is closed."""


class PoolBackend(ABC):
    """A place for users' objects, inside budgets of its own, evicting whole users when it needs room.

    Rules for all methods:

    - Thread-safe, and safe to call at any time, also while another thread calls :meth:`close`; after it they raise
      :class:`PoolUnavailableError`.
    - They return in bounded time, whatever the pool does, and raise nothing but the errors above.
    - ``user`` names the eviction group that an object belongs to; objects of one user are evicted together. It is any
      text and part of no key: two users' keys never meet because keys contain the user (``records/keys.py``).
    - Who goes first is the backend's to say. It may go by uses (reading or locating a user's objects, or writing one)
      or by requests (:meth:`count_request`), but does not evict a user between two uses that follow at once, if it can
      evict others.
    """

    @property
    def parallel_gets(self) -> int:
        """From how many threads it is fastest to get a user's extents."""
        return 1

    def register(self, regions: Sequence[Region]) -> None:  # noqa: B027 - most transports need nothing here
        """Announce memory that later calls read from or write to, for as long as the backend lives.

        Raises:
            PoolUnavailableError: the transport refuses the memory.

        """

    def count_request(self, user: str) -> None:  # noqa: B027 - most pools evict by an order of their own
        """A request asks for ``user``, whether the pool has anything of him or not. Once per request.

        Cheap, and nothing that can fail: it is for the order of eviction alone.
        """

    @abstractmethod
    def put(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        """Write an extent: the bytes of ``parts``, one after the other. It is visible when the call returns.

        The caller keeps the bytes unchanged until then, and never uses ``key`` for a second put.

        Returns:
            Where it lies now.

        Raises:
            PoolFullError: nothing was written.
            PoolUnavailableError: whether anything was written is not known; the key must not be used again.

        """

    @abstractmethod
    def get(self, user: str, key: str, parts: Sequence[Region]) -> Tier:
        """Read a whole extent into ``parts``, whose sizes add up to exactly the extent's.

        What it delivers is what was put under this very key: identity and checksum are verified. If it raises, the
        contents of ``parts`` are undefined. The same memory may occur in ``parts`` more than once, for bytes that
        nobody wants. Nobody else may write to ``parts`` meanwhile: what has arrived is read again to verify it.

        Returns:
            Where it came from.

        Raises:
            ObjectMissingError: there is no such extent.
            ObjectCorruptError: what is there fails verification or has another size. It will not be served again.
            PoolUnavailableError: it could not be read.

        """

    @abstractmethod
    def locate(self, user: str, keys: Sequence[str]) -> list[Tier | None]:
        """Where each extent lies, ``None`` for those that do not exist.

        Raises:
            PoolUnavailableError: the answer is not known.

        """

    @abstractmethod
    def put_record(self, user: str, key: str, data: bytes) -> None:
        """Write or replace a record. Readers see the old bytes, the new ones, or a mixture that they must detect.

        Raises:
            PoolFullError: the old record, if there was one, is still there.
            PoolUnavailableError: the record is the old one, the new one or gone.

        """

    @abstractmethod
    def get_record(self, user: str, key: str) -> bytes | None:
        """A record's bytes, perhaps torn (see :meth:`put_record`); ``None`` if there is none.

        Raises:
            PoolUnavailableError: the answer is not known.

        """

    @abstractmethod
    def remove(self, user: str, keys: Sequence[str]) -> list[str]:
        """Remove extents or records; keys that do not exist are fine.

        Returns:
            The keys that still exist, because somebody reads them or the pool did not say that they are gone.

        Raises:
            PoolUnavailableError: nothing is known about any of them.

        """

    @abstractmethod
    def usage(self) -> list[TierUsage]:
        """What this process knows of the bytes in each tier; cheap.

        Raises:
            PoolUnavailableError: nothing is known.

        """

    def counters(self) -> dict[str, int]:
        """What has happened inside since the start, for metrics: names and counts of the backend's choice. Cheap."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Finish running operations, write down what should survive, and let go of everything. Idempotent."""
