"""What scheduler and workers send each other: jobs inside vLLM's step, calls and replies beside it.

Jobs travel in the connector's metadata, with the step that makes them possible. Calls also work while the engine is
idle, or before a request is scheduled. They go through the lookup RPC (``lookup_client.py``, ``lookup_server.py``) as
msgpack: an array of the class's name and its fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from userkv.records.load_plan import ExtentRead
from userkv.records.record import Extent

WireExtent = tuple[int, int, int]
"""An extent on the wire: id, first block, number of blocks."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill blocks of a request from the pool.

    Attributes:
        job_id: names the job in reports.
        request_id: the vLLM request that waits for the load.
        uid: the user, as in keys.
        namespace: model and weights.
        reads: the extents to read.
        block_ids: the engine's blocks that ``reads`` refer to by index.

    """

    job_id: int
    request_id: str
    uid: str
    namespace: str
    reads: tuple[ExtentRead, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Write extents of a user's history.

    Attributes:
        job_id: names the job in the notice that ends it.
        uid: the user, as in keys.
        namespace: model and weights.
        extents: each with the engine's blocks that hold it.
        live_block: the block that a running request may still write to behind the history's end; -1 if there is none.
        during_forward: write layer by layer while the step computes, not afterwards.

    """

    job_id: int
    uid: str
    namespace: str
    extents: tuple[tuple[Extent, tuple[int, ...]], ...]
    live_block: int
    during_forward: bool = False


class LoadReport(NamedTuple):
    """How a load ended on a worker."""

    job_id: int
    ok: bool


@dataclass(slots=True)
class StepJobs:
    """What a step asks of each worker."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports to the scheduler once, when the engine starts.

    Attributes:
        endpoint: ZeroMQ address of the worker's :class:`MooncakeLookupServer`.
        layout: text that is equal for two workers exactly if their KV blocks have the same bytes.
        block_nbytes: bytes of one KV block on this worker.

    """

    endpoint: str
    layout: str
    block_nbytes: int


class RegisterCall(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The scheduler registers: this worker sends all replies and notices to it from now on.

    Attributes:
        call_id: names the call in its reply; likewise in all other calls.

    """

    call_id: int


class LookupCall(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Ask for a user's record, and for the tier of each of its extents on this worker.

    Attributes:
        uid: the user, as in keys; likewise in all other calls.
        namespace: model and weights; likewise in all other calls.
        is_new_request: a request asks for the first time, which counts as a use of this user's KV.

    """

    call_id: int
    uid: str
    namespace: str
    is_new_request: bool = False


class LocateCall(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Ask for the tier of this worker's objects of some extents."""

    call_id: int
    uid: str
    namespace: str
    extents: tuple[WireExtent, ...]


class CommitCall(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Make saved extents visible by replacing the user's record.

    Attributes:
        record: the new record, encoded.
        base_generation: the generation of the record that it was made from; 0 if there was none.

    """

    call_id: int
    uid: str
    namespace: str
    record: bytes
    base_generation: int


class RemoveCall(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Remove this worker's objects of extents that no record names."""

    call_id: int
    uid: str
    namespace: str
    extents: tuple[WireExtent, ...]


Call = RegisterCall | LookupCall | LocateCall | CommitCall | RemoveCall


class LookupReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to :class:`LookupCall`.

    Attributes:
        record: the encoded record; empty if there is none.
        tiers: for each of its extents the tier, or "" if this worker does not have it.

    """

    call_id: int
    record: bytes
    tiers: tuple[str, ...]


class LocateReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to :class:`LocateCall`; without tiers also to :class:`RegisterCall` and :class:`RemoveCall`.

    Attributes:
        tiers: for each extent the tier, or "" if this worker does not have it.

    """

    call_id: int
    tiers: tuple[str, ...] = ()


class CommitReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to :class:`CommitCall`.

    Attributes:
        committed: the record was replaced.
        generation: the generation of the user's record now.
        garbage: extents that no record names any more.
        reason: why the commit was refused.

    """

    call_id: int
    committed: bool
    generation: int
    garbage: tuple[WireExtent, ...]
    reason: str


class ErrorReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to any call that failed, for example because the pool is down."""

    call_id: int
    reason: str


class SaveNotice(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A worker has ended a :class:`SaveJob`. It is sent without a call.

    Attributes:
        job_id: the job.
        ok: all of this worker's part was written.
        dropped: it was not written because too many saves wait; never true with ``ok``.

    """

    job_id: int
    ok: bool
    dropped: bool = False


Reply = LookupReply | LocateReply | CommitReply | ErrorReply
ToScheduler = Reply | SaveNotice


def extents_to_wire(extents: Sequence[Extent]) -> tuple[WireExtent, ...]:
    """The wire form of extents."""
    return tuple((extent.extent_id, extent.first_block, extent.num_blocks) for extent in extents)


def extents_from_wire(extents: tuple[WireExtent, ...]) -> tuple[Extent, ...]:
    """Extents from their wire form."""
    return tuple(Extent(*extent) for extent in extents)
