"""One answer from all ranks: a user's KV exists only as far as every rank has its part of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from userkv.engine.pool.wire.lookup_rpc import MooncakeLookupClient
from userkv.engine.pool.wire.messages import (
    Commit,
    Committed,
    Found,
    Locate,
    Located,
    Lookup,
    Remove,
    Reply,
    from_wire,
    to_wire,
)
from userkv.records.load_plan import usable_part
from userkv.records.record import Extent, RecordError, UserRecord
from userkv.store.backend import Tier


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """What the pool knows of a user.

    Attributes:
        known: the pool has answered; otherwise nothing is known, which is a miss too.
        record: the user's record, perhaps a tombstone; ``None`` if there is none.
        usable: the part of the record that all ranks can load; ``None`` if there is nothing.
        tier: the slowest tier among the extents that exist.

    """

    known: bool
    record: UserRecord | None = None
    usable: UserRecord | None = None
    tier: Tier | None = None


UNKNOWN = PoolAnswer(known=False)
ABSENT = PoolAnswer(known=True)


@dataclass(frozen=True, slots=True)
class CommitAnswer:
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
        done: Callable[[PoolAnswer], None],
        *,
        counts: bool = False,
        patient: bool = False,
    ) -> None:
        """Ask rank 0 for the record, then all others whether they have their part of its extents.

        Args:
            uid: whose record.
            namespace: of which model and weights.
            done: told the answer.
            counts: this is the first question of a request, which is one for the order of eviction.
            patient: no request waits for the answer.

        """

        def found(reply: Reply) -> None:
            if not isinstance(reply, Found):
                done(UNKNOWN)
                return
            try:
                record = UserRecord.decode(reply.record, uid, namespace) if reply.record else None
            except RecordError:
                record = None
            if record is None:
                done(ABSENT)
            elif self.num_ranks == 1 or not record.extents:
                done(_agree(record, [reply.tiers]))
            else:
                self._ask_others(uid, namespace, record, reply.tiers, done)

        self._client.call(0, Lookup, found, uid, namespace, counts, patient=patient)

    def commit(
        self, uid: str, namespace: str, record: UserRecord, base_generation: int, done: Callable[[CommitAnswer], None]
    ) -> None:
        """Let rank 0 replace the record; every rank must have written its part before."""

        def committed(reply: Reply) -> None:
            if isinstance(reply, Committed):
                done(CommitAnswer(reply.committed, not reply.committed, from_wire(reply.garbage)))
            else:
                done(CommitAnswer(committed=False))

        self._client.call(
            0, Commit, committed, uid, namespace, record.encode(uid, namespace), base_generation, patient=True
        )

    def remove(self, uid: str, namespace: str, extents: Sequence[Extent]) -> None:
        """Remove extents that no record names, on all ranks; those that are in use go later."""
        if extents:
            for rank in range(self.num_ranks):
                self._client.call(rank, Remove, lambda reply: None, uid, namespace, to_wire(tuple(extents)))

    def close(self) -> None:
        """Stop the client; open calls fail."""
        self._client.close()

    def _ask_others(
        self,
        uid: str,
        namespace: str,
        record: UserRecord,
        mine: tuple[str, ...],
        done: Callable[[PoolAnswer], None],
    ) -> None:
        votes = [mine]

        def located(reply: Reply) -> None:
            votes.append(reply.tiers if isinstance(reply, Located) else ())
            if len(votes) == self.num_ranks:
                done(_agree(record, votes))

        for rank in range(1, self.num_ranks):
            self._client.call(rank, Locate, located, uid, namespace, to_wire(record.extents))


def _agree(record: UserRecord, votes: Sequence[tuple[str, ...]]) -> PoolAnswer:
    if any(len(tiers) != len(record.extents) for tiers in votes):
        return UNKNOWN
    by_extent = list(zip(*votes, strict=True))
    present = [all(tiers) for tiers in by_extent]
    used = {tier for tiers in by_extent for tier in tiers if tier}
    tier = Tier.SSD if Tier.SSD in used else Tier.DRAM if used else None
    usable = usable_part(record, present) if record.extents else None
    return PoolAnswer(True, record, usable, tier if usable is not None else None)
