"""What a worker answers when the scheduler's half asks it about the pool."""

from collections.abc import Sequence

from userkv.engine.pool.wire.messages import (
    Call,
    CommitCall,
    CommitReply,
    ErrorReply,
    LocateReply,
    LookupCall,
    LookupReply,
    RegisterCall,
    RemoveCall,
    Reply,
    extents_from_wire,
    extents_to_wire,
)
from userkv.records.record import RecordError, UserRecord
from userkv.store.backend import StoreError, Tier
from userkv.store.user_store import MooncakeUserStore


def answer(store: MooncakeUserStore, call: Call) -> Reply:
    """What this worker knows; called from the RPC server's threads."""
    try:
        match call:
            case LookupCall():
                if call.is_new_request:
                    store.count_request(call.uid, call.namespace)
                record = store.lookup(call.uid, call.namespace)
                if record is None:
                    return LookupReply(call.call_id, b"", ())
                tiers = _tiers(store.present(call.uid, call.namespace, record.extents))
                return LookupReply(call.call_id, record.encode(call.uid, call.namespace), tiers)
            case CommitCall():
                record = UserRecord.decode(call.record, call.uid, call.namespace)
                result = store.commit(call.uid, call.namespace, record, call.base_generation)
                return CommitReply(
                    call.call_id,
                    result.committed,
                    result.record.generation,
                    extents_to_wire(result.garbage),
                    result.reason,
                )
            case RemoveCall():
                store.remove_extents(call.uid, call.namespace, extents_from_wire(call.extents))
                return LocateReply(call.call_id)
            case RegisterCall():
                return LocateReply(call.call_id)
            case _:
                tiers = _tiers(store.present(call.uid, call.namespace, extents_from_wire(call.extents)))
                return LocateReply(call.call_id, tiers)
    except (StoreError, RecordError, ValueError) as error:
        return ErrorReply(call.call_id, str(error))


def _tiers(tiers: Sequence[Tier | None]) -> tuple[str, ...]:
    return tuple("" if tier is None else tier.value for tier in tiers)
