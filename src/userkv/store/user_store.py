"""Users in a pool backend, as one worker sees them: look-up, extents, commit, deletion.

A user has one record, and one object per extent and worker, or per extent, worker and layer. The record alone makes
extents visible, so a commit is the replacing of the record, and a deletion begins with it, too.

The pool cannot compare and replace at once, so some cases stay open. If two processes commit one user at the same
moment, between reading and writing his record, then the later one wins, and what the other one wrote stays until the
pool evicts the user. A commit that hangs in that moment while another process deletes the user brings him back. Within
a process, commits and deletions of a user exclude each other.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from userkv.records.keys import LayerMooncakeUserKey, MooncakeUserKey, ValueType
from userkv.records.record import Extent, RecordError, UserRecord
from userkv.store.backend import PoolBackend, Region, Tier, TierUsage
from userkv.store.records import RecordStore, group_of, next_generation
from userkv.store.removals import PendingRemovals

DELETE_ROUNDS = 3
"""How often a deletion starts again because somebody committed meanwhile."""

_STRIPES = 64


@dataclass(frozen=True, slots=True)
class CommitResult:
    """How a commit ended.

    Attributes:
        committed: the record is in the pool.
        record: the record as committed, with its final generation; if refused, as it was given.
        garbage: extents that no record names any more, to be removed on all workers.
        reason: why it was refused, else "".

    """

    committed: bool
    record: UserRecord
    garbage: tuple[Extent, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """How a deletion ended.

    Attributes:
        found: there was something to delete.
        tombstone: the record was seen to be a tombstone at the end; from then on no look-up finds the user.
        remaining: keys of objects that are not known to be gone; ``sweep`` tries them again.
        extents: what the user had, for workers with a pool of their own.
        unreadable: a record could not be read, so its extents are unknown and stay, unfindable, until they are evicted.

    """

    found: bool
    tombstone: bool
    remaining: tuple[str, ...]
    extents: tuple[Extent, ...] = ()
    unreadable: bool = False

    @property
    def complete(self) -> bool:
        """Nothing of the user is left."""
        return self.tombstone and not self.remaining and not self.unreadable


class MooncakeUserStore:
    """Users in a pool backend. Thread-safe; methods raise what the backend's methods raise, except where noted.

    Args:
        backend: the pool.
        world_size: workers that share one copy of the model.
        worker_id: which of them this is.
        num_layers: layers of this worker in layerwise mode: one object per extent and layer; 0 = one per extent.
        clock: unix seconds.
        monotonic: seconds, for tries to remove.

    """

    def __init__(
        self,
        backend: PoolBackend,
        world_size: int,
        worker_id: int,
        num_layers: int = 0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._world_size = world_size
        self._worker_id = worker_id
        self._num_layers = num_layers
        self._clock = clock
        self._records = RecordStore(backend, world_size, self._count)
        self._removals = PendingRemovals(backend, monotonic)
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    def lookup(self, uid: str, namespace: str) -> UserRecord | None:
        """The user's record; ``None`` if there is none, it has expired or it cannot be read.

        A tombstone is returned, since its generation matters to writers. At most a few milliseconds beyond what the
        backend takes.
        """
        try:
            record = self._records.read(uid, namespace)
        except RecordError:
            return None
        if record is not None and record.expired(self._clock()):
            self._count("expired_records")
            return None
        return record

    def count_request(self, uid: str, namespace: str) -> None:
        """A request asks for a user; see :meth:`PoolBackend.count_request`."""
        self._backend.count_request(group_of(uid, namespace))

    def keys_of(self, uid: str, namespace: str, extent: Extent) -> list[str]:
        """The keys of this worker's objects of an extent: one, or one per layer."""
        return self._keys(uid, namespace, extent, self._worker_id)

    def present(self, uid: str, namespace: str, extents: Sequence[Extent]) -> list[Tier | None]:
        """Where this worker's part of each extent lies: the slowest tier of its layers; ``None`` if any is missing."""
        if not extents:
            return []
        keys = [key for extent in extents for key in self.keys_of(uid, namespace, extent)]
        tiers = self._backend.locate(group_of(uid, namespace), keys)
        step = len(keys) // len(extents)
        return [_slowest(tiers[start : start + step]) for start in range(0, len(keys), step)]

    def put_extent(
        self, uid: str, namespace: str, extent: Extent, parts: Sequence[Region], layer: int | None = None
    ) -> Tier:
        """Write this worker's part of an extent, or one layer of it."""
        return self._backend.put(group_of(uid, namespace), self._key(uid, namespace, extent, layer), parts)

    def get_extent(
        self, uid: str, namespace: str, extent: Extent, parts: Sequence[Region], layer: int | None = None
    ) -> Tier:
        """Read this worker's part of an extent, or one layer of it."""
        return self._backend.get(group_of(uid, namespace), self._key(uid, namespace, extent, layer), parts)

    def commit(self, uid: str, namespace: str, record: UserRecord, base_generation: int) -> CommitResult:
        """Replace the user's record, after all workers have written the new extents.

        Refused if an extent is gone, or if the record in the pool is not the one from which this one was planned: the
        user was deleted, or another engine came first and has removed extents on which this record builds. Expired
        and unreadable records count as none, as for :meth:`lookup`; so what a writer left who died is replaced.

        Args:
            uid: whose record.
            namespace: of which model and weights.
            record: what to commit; its generation is set here.
            base_generation: of the record from which it was planned; 0 = there was none.

        Raises:
            PoolFullError: the old record is still there.
            PoolUnavailableError: it is not known whether the record was replaced. The new extents may be left or
                removed: what a record names and is gone counts as a miss.

        """
        with self._stripe(uid, namespace):
            if None in self.present(uid, namespace, record.extents):
                return self._refuse(record, "an extent that the record names is gone")
            try:
                current = self._records.read(uid, namespace)
            except RecordError:
                current = None
            if not self._is_base(current, base_generation):
                what = "deleted" if current is not None and current.deleted else "saved or lost"
                return self._refuse(record, f"the user was {what} meanwhile")
            record = replace(record, generation=next_generation(current, self._clock()))
            self._records.write(uid, namespace, record)
        self._count("commits")
        named = set(record.extents)
        garbage = () if current is None else tuple(extent for extent in current.extents if extent not in named)
        return CommitResult(True, record, garbage)

    def remove_extents(self, uid: str, namespace: str, extents: Sequence[Extent]) -> list[Extent]:
        """Remove this worker's objects of extents; raises nothing.

        Returns:
            The extents of which something is not known to be gone; :meth:`sweep` tries them again.

        """
        keys_of = {extent: self.keys_of(uid, namespace, extent) for extent in extents}
        left = set(self._removals.remove(group_of(uid, namespace), [key for keys in keys_of.values() for key in keys]))
        return [extent for extent, keys in keys_of.items() if not left.isdisjoint(keys)]

    def sweep(self) -> int:
        """Try removals again that are due; raises nothing.

        Returns:
            How many objects still have to go.

        """
        return self._removals.sweep()

    def delete(self, uid: str, namespace: str) -> DeleteReport:
        """Delete a user: a tombstone first, so that nobody finds him, then the objects of all workers.

        Call it again while the report is not complete. Leases of readers delay it (10 s in Mooncake).

        Raises:
            PoolUnavailableError: it is not known whether the tombstone was written.

        """
        group = group_of(uid, namespace)
        found = unreadable = tombstone = False
        extents: dict[Extent, None] = {}
        remaining: list[str] = []
        with self._stripe(uid, namespace):
            for _ in range(DELETE_ROUNDS):
                current = None
                try:
                    current = self._records.read(uid, namespace)
                except RecordError:
                    found = unreadable = True
                if current is not None:
                    found |= not current.deleted
                    extents.update(dict.fromkeys(current.extents))
                remaining = self._records.bury(uid, namespace, current, f"delete@{self._worker_id}", self._clock())
                keys = dict.fromkeys(self._removals.of_user(group))
                for extent in extents:
                    for worker in range(self._world_size):
                        keys.update(dict.fromkeys(self._keys(uid, namespace, extent, worker)))
                remaining += self._removals.remove(group, list(keys), verify=True)
                tombstone = self._records.is_buried(uid, namespace)
                if tombstone:
                    break
        return DeleteReport(found, tombstone, tuple(remaining), tuple(extents), unreadable)

    def usage(self) -> list[TierUsage]:
        """Bytes in each tier, as the backend knows them."""
        return self._backend.usage()

    def statistics(self) -> dict[str, int]:
        """Counts since the start, and how many removals are pending."""
        with self._counts_lock:
            counts = dict(self._counts)
        return counts | {"pending_removals": len(self._removals), "dropped_removals": self._removals.dropped}

    def _is_base(self, current: UserRecord | None, base_generation: int) -> bool:
        if current is None:
            return base_generation == 0
        return current.generation == base_generation or (base_generation == 0 and current.expired(self._clock()))

    def _refuse(self, record: UserRecord, reason: str) -> CommitResult:
        self._count("refused_commits")
        return CommitResult(False, record, reason=reason)

    def _count(self, name: str) -> None:
        with self._counts_lock:
            self._counts[name] += 1

    def _stripe(self, uid: str, namespace: str) -> threading.Lock:
        return self._stripes[hash((uid, namespace)) % _STRIPES]

    def _key(self, uid: str, namespace: str, extent: Extent, layer: int | None) -> str:
        if (layer is None) != (self._num_layers == 0):
            raise ValueError("a layer is named in layerwise mode and only then")
        whole = self._whole_key(uid, namespace, extent, self._worker_id)
        return str(whole if layer is None else LayerMooncakeUserKey(whole, layer))

    def _keys(self, uid: str, namespace: str, extent: Extent, worker_id: int) -> list[str]:
        whole = self._whole_key(uid, namespace, extent, worker_id)
        return [str(layer) for layer in whole.split_layers(self._num_layers)] if self._num_layers else [str(whole)]

    def _whole_key(self, uid: str, namespace: str, extent: Extent, worker_id: int) -> MooncakeUserKey:
        return MooncakeUserKey(uid, namespace, self._world_size, worker_id, ValueType.KV_CACHE, extent.extent_id)


def _slowest(tiers: Sequence[Tier | None]) -> Tier | None:
    if None in tiers:
        return None
    return Tier.SSD if Tier.SSD in tiers else Tier.DRAM
