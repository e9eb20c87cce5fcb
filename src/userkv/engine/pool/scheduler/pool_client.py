"""One answer from all ranks: a user's KV exists only as far as every rank has its part of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from userkv.engine.pool.wire.lookup_client import MooncakeLookupClient
from userkv.engine.pool.wire.messages import (
    CommitCall,
    CommitReply,
    LocateCall,
    LocateReply,
    LookupCall,
    LookupReply,
    RemoveCall,
    Reply,
    extents_from_wire,
    extents_to_wire,
)
from userkv.records.load_plan import usable_part
from userkv.records.record import Extent, RecordError, UserRecord
from userkv.store.backend import Tier


@dataclass(frozen=True, slots=True)
class PoolLookupResult:
    """What the pool knows of a user.

    Attributes:
        succeeded: all ranks have answered. If not, nothing else is known, and the user counts as a miss.
        record: the user's record, perhaps a tombstone; ``None`` if there is none.
        usable: the part of the record that all ranks can load; ``None`` if there is nothing.
        tier: the slowest tier among the extents that exist.

    """

    succeeded: bool
    record: UserRecord | None = None
    usable: UserRecord | None = None
    tier: Tier | None = None


LOOKUP_FAILED = PoolLookupResult(succeeded=False)
NOT_IN_POOL = PoolLookupResult(succeeded=True)


@dataclass(frozen=True, slots=True)
class PoolCommitResult:
    """How a commit ended: done, refused, or (neither) unknown. ``garbage``: extents that no record names any more."""

    committed: bool
    refused: bool = False
    garbage: tuple[Extent, ...] = ()


class PoolClient:
    """The pool as the scheduler sees it. Any thread; answers come on the RPC client's thread."""

    def __init__(self, client: MooncakeLookupClient) -> None:
        self.num_ranks = client.num_ranks
        self._client = client

    def lookup(
        self,
        uid: str,
        namespace: str,
        done: Callable[[PoolLookupResult], None],
        *,
        is_new_request: bool = False,
        background: bool = False,
    ) -> None:
        """Ask rank 0 for the record, then all others whether they have their part of its extents.

        Args:
            uid: the user's name in the pool.
            namespace: model and weights.
            done: called with the answer.
            is_new_request: this is the first look-up of a request; it counts as a use for the eviction policy.
            background: no request waits for the answer.

        """

        def found(reply: Reply) -> None:
            if not isinstance(reply, LookupReply):
                done(LOOKUP_FAILED)
                return
            try:
                record = UserRecord.decode(reply.record, uid, namespace) if reply.record else None
            except RecordError:
                record = None
            if record is None:
                done(NOT_IN_POOL)
            elif self.num_ranks == 1 or not record.extents:
                done(_agree(record, [reply.tiers]))
            else:
                self._ask_others(uid, namespace, record, reply.tiers, done)

        self._client.call(0, LookupCall, found, uid, namespace, is_new_request, background=background)

    def commit(
        self,
        uid: str,
        namespace: str,
        record: UserRecord,
        base_generation: int,
        done: Callable[[PoolCommitResult], None],
    ) -> None:
        """Let rank 0 replace the record; every rank must have written its part before."""

        def committed(reply: Reply) -> None:
            if isinstance(reply, CommitReply):
                done(PoolCommitResult(reply.committed, not reply.committed, extents_from_wire(reply.garbage)))
            else:
                done(PoolCommitResult(committed=False))

        self._client.call(
            0, CommitCall, committed, uid, namespace, record.encode(uid, namespace), base_generation, background=True
        )

    def remove(self, uid: str, namespace: str, extents: Sequence[Extent]) -> None:
        """Remove extents that no record names, on all ranks; those that are in use go later."""
        if extents:
            for rank in range(self.num_ranks):
                self._client.call(rank, RemoveCall, lambda reply: None, uid, namespace, extents_to_wire(tuple(extents)))

    def close(self) -> None:
        """Stop the client; open calls fail."""
        self._client.close()

    def _ask_others(
        self,
        uid: str,
        namespace: str,
        record: UserRecord,
        mine: tuple[str, ...],
        done: Callable[[PoolLookupResult], None],
    ) -> None:
        votes = [mine]

        def located(reply: Reply) -> None:
            votes.append(reply.tiers if isinstance(reply, LocateReply) else ())
            if len(votes) == self.num_ranks:
                done(_agree(record, votes))

        for rank in range(1, self.num_ranks):
            self._client.call(rank, LocateCall, located, uid, namespace, extents_to_wire(record.extents))


def _agree(record: UserRecord, votes: Sequence[tuple[str, ...]]) -> PoolLookupResult:
    if any(len(tiers) != len(record.extents) for tiers in votes):
        return LOOKUP_FAILED
    by_extent = list(zip(*votes, strict=True))
    present = [all(tiers) for tiers in by_extent]
    used = {tier for tiers in by_extent for tier in tiers if tier}
    tier = Tier.SSD if Tier.SSD in used else Tier.DRAM if used else None
    usable = usable_part(record, present) if record.extents else None
    return PoolLookupResult(True, record, usable, tier if usable is not None else None)
