"""Users' records in a pool backend: where they lie, and how torn ones are read again."""

import time
from collections.abc import Callable
from urllib.parse import quote

from userkv.records.keys import MooncakeUserKey, ValueType
from userkv.records.record import RecordError, TornRecordError, UserRecord
from userkv.store.backend import PoolBackend, PoolFullError

TORN_PAUSES = (0.001, 0.002, 0.004)
"""Seconds to wait before a torn record is read again. Somebody writes it right now, or died while he did."""


def group_of(uid: str, namespace: str) -> str:
    """The eviction group of a user: what the backend's methods call ``user``."""
    return f"{quote(uid, safe='')}@{quote(namespace, safe='')}"


def next_generation(current: UserRecord | None, now: float) -> int:
    """A generation for the record that replaces ``current``.

    It follows the time (microseconds since 1970), so that it also grows when the pool has lost the record in between:
    no two records of a user are taken for each other.
    """
    return max(1 if current is None else current.generation + 1, int(now * 1e6))


class RecordStore:
    """Reads and writes records. Thread-safe; methods raise what the backend's methods raise, except where noted.

    Args:
        backend: the pool.
        world_size: workers that share one copy of the model. A user has one record whatever their number: its key
            names worker 0.
        count: told the names of events: ``torn_records``, ``unreadable_records``.

    """

    def __init__(self, backend: PoolBackend, world_size: int, count: Callable[[str], None]) -> None:
        self._backend = backend
        self._world_size = world_size
        self._count = count

    def read(self, uid: str, namespace: str) -> UserRecord | None:
        """The record, expired or not; ``None`` if there is none. Takes a few milliseconds longer if it is torn.

        Raises:
            RecordError: there is one, but it cannot be read.

        """
        key = self._key(uid, namespace)
        pauses = iter(TORN_PAUSES)
        while True:
            data = self._backend.get_record(group_of(uid, namespace), key)
            if data is None:
                return None
            try:
                return UserRecord.decode(data, uid, namespace)
            except TornRecordError:
                self._count("torn_records")
                pause = next(pauses, None)
                if pause is None:
                    raise
                time.sleep(pause)
            except RecordError:
                self._count("unreadable_records")
                raise

    def write(self, uid: str, namespace: str, record: UserRecord) -> None:
        """Write or replace it."""
        key = self._key(uid, namespace)
        self._backend.put_record(group_of(uid, namespace), key, record.encode(uid, namespace))

    def bury(self, uid: str, namespace: str, current: UserRecord | None, writer: str, now: float) -> list[str]:
        """Replace it by a tombstone; in a pool without room, remove it instead. Returns its key if it stayed."""
        try:
            self.write(uid, namespace, UserRecord.tombstone(next_generation(current, now), writer, now))
        except PoolFullError:
            return self._backend.remove(group_of(uid, namespace), [self._key(uid, namespace)])
        return []

    def is_buried(self, uid: str, namespace: str) -> bool:
        """Whether it is a tombstone."""
        try:
            current = self.read(uid, namespace)
        except RecordError:
            return False
        return current is not None and current.deleted

    def _key(self, uid: str, namespace: str) -> str:
        return str(MooncakeUserKey(uid, namespace, self._world_size, 0, ValueType.TOKEN_ID))
