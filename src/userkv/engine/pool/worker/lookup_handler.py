"""What a worker answers when the scheduler's half asks it about the pool."""

from collections.abc import Sequence

from userkv.engine.pool.wire.messages import (
    Call,
    Commit,
    Committed,
    Failed,
    Found,
    Hello,
    Located,
    Lookup,
    Remove,
    Reply,
    from_wire,
    to_wire,
)
from userkv.records.record import RecordError, UserRecord
from userkv.store.backend import StoreError, Tier
from userkv.store.user_store import MooncakeUserStore


def answer(store: MooncakeUserStore, call: Call) -> Reply:
    """What this worker knows; called from the RPC server's threads."""
    try:
        match call:
            case Lookup():
                if call.counts:
                    store.note_request(call.uid, call.namespace)
                record = store.lookup(call.uid, call.namespace)
                if record is None:
                    return Found(call.call_id, b"", ())
                tiers = _tiers(store.present(call.uid, call.namespace, record.extents))
                return Found(call.call_id, record.encode(call.uid, call.namespace), tiers)
            case Commit():
                record = UserRecord.decode(call.record, call.uid, call.namespace)
                result = store.commit(call.uid, call.namespace, record, call.base_generation)
                return Committed(
                    call.call_id,
                    result.committed,
                    result.record.generation,
                    to_wire(result.garbage),
                    result.reason,
                )
            case Remove():
                store.remove_extents(call.uid, call.namespace, from_wire(call.extents))
                return Located(call.call_id)
            case Hello():
                return Located(call.call_id)
            case _:
                tiers = _tiers(store.present(call.uid, call.namespace, from_wire(call.extents)))
                return Located(call.call_id, tiers)
    except (StoreError, RecordError, ValueError) as error:
        return Failed(call.call_id, str(error))


def _tiers(tiers: Sequence[Tier | None]) -> tuple[str, ...]:
    return tuple("" if tier is None else tier.value for tier in tiers)
