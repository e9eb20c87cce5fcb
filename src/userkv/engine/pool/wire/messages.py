"""What scheduler and workers say to each other: jobs inside vLLM's step, requests and replies beside it.

Jobs travel in the connector's metadata, with the step that makes them possible. Everything that must also work while
the engine is idle, or before a request is scheduled, goes through the lookup RPC (``lookup_rpc.py``) as msgpack.
"""

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
        request_id: the vLLM request that waits for it.
        uid: whose KV, as in keys.
        namespace: under which model and weights.
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
        uid: whose KV, as in keys.
        namespace: under which model and weights.
        extents: each with the engine's blocks that hold it.
        live_block: the block that a running request may still write to behind the history's end; -1 if there is none.
        during_forward: layer by layer while the step computes, not afterwards.

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


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The scheduler introduces itself: notices go to it from now on."""

    call_id: int


class Lookup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Ask for a user's record and where this worker's extents are; ``counts`` for a request that asks first."""

    call_id: int
    uid: str
    namespace: str
    counts: bool = False


class Locate(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Ask where this worker's objects of some extents are."""

    call_id: int
    uid: str
    namespace: str
    extents: tuple[WireExtent, ...]


class Commit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Make saved extents visible by replacing the user's record."""

    call_id: int
    uid: str
    namespace: str
    record: bytes
    base_generation: int


class Remove(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Remove this worker's objects of extents that no record names."""

    call_id: int
    uid: str
    namespace: str
    extents: tuple[WireExtent, ...]


Call = Hello | Lookup | Locate | Commit | Remove


class Found(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to :class:`Lookup`: the encoded record, and for each of its extents the tier, or "" if it is gone."""

    call_id: int
    record: bytes
    tiers: tuple[str, ...]


class Located(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to :class:`Locate`, :class:`Hello` and :class:`Remove`: a tier per extent, or nothing."""

    call_id: int
    tiers: tuple[str, ...] = ()


class Committed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to :class:`Commit`."""

    call_id: int
    committed: bool
    generation: int
    garbage: tuple[WireExtent, ...]
    reason: str


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Reply to any call that the pool did not answer."""

    call_id: int
    reason: str


class Saved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Notice, not a reply: a worker has ended a :class:`SaveJob`."""

    job_id: int
    ok: bool
    dropped: bool = False


Reply = Found | Located | Committed | Failed
ToScheduler = Reply | Saved


def to_wire(extents: "tuple[Extent, ...] | list[Extent]") -> tuple[WireExtent, ...]:
    """Extents as they are sent."""
    return tuple((extent.extent_id, extent.first_block, extent.num_blocks) for extent in extents)


def from_wire(extents: tuple[WireExtent, ...]) -> tuple[Extent, ...]:
    """Extents as they were sent."""
    return tuple(Extent(*extent) for extent in extents)
