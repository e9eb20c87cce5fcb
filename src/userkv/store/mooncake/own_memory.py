"""The memory that this process lends to the pool: what lies there can be read without asking anybody.

Mooncake would copy it, too, but then the copy has to be read once more to be verified. The backend's own copy is
verified piece by piece on the way, while the bytes are in the CPU's cache.

The library does not say where the memory is. So an object is put there to see what its address looks like, and is
looked for among the addresses that the process got while the library was set up. What a master says later counts only
if it lies in that same range; a wrong answer (of the past, when it was another process's) is then at worst the wrong
bytes, which verification finds.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from userkv.store.backend import Region

_MAPS = Path("/proc/self/maps")
_RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw", re.MULTILINE)
Ranges = list[tuple[int, int]]


class OwnMemory(NamedTuple):
    """Where the lent memory is.

    Attributes:
        endpoint: how descriptors of objects name this process.
        start: first address.
        end: first address after it.

    """

    endpoint: str
    start: int
    end: int

    def holds(self, region: Region) -> bool:
        """Whether all of a region lies in it."""
        return self.start <= region.address and region.address + region.nbytes <= self.end

    def place(self, descriptor: Any) -> Region | None:
        """Where an object lies, of which Mooncake has this buffer descriptor; ``None`` if not in this memory."""
        region = Region(descriptor.buffer_address, descriptor.size)
        return region if descriptor.transport_endpoint == self.endpoint and self.holds(region) else None


def mapped() -> Ranges:
    """The ranges of addresses that this process can read and write now; none where the system does not tell."""
    with contextlib.suppress(OSError):
        return [(int(start, 16), int(end, 16)) for start, end in _RANGE.findall(_MAPS.read_text())]
    return []


def find_own_memory(store: Any, nbytes: int, before: Ranges) -> OwnMemory | None:
    """Find the memory that a client lends.

    Args:
        store: the client.
        nbytes: how much it lends.
        before: what was mapped before it was set up.

    """
    from mooncake.store import ReplicateConfig

    there = ReplicateConfig()
    there.preferred_segment = store.get_hostname()
    key = f"userkv-where@{os.urandom(16).hex()}"
    if store.put(key, b"here", there):
        return None
    try:
        replicas = store.batch_get_replica_desc([key]).get(key, ())
    finally:
        store.remove(key, True)
    for replica in replicas:
        if replica.is_memory_replica():
            descriptor = replica.get_memory_descriptor().buffer_descriptor
            for start, end in new_ranges(before, mapped()):
                if start <= descriptor.buffer_address < end and end - start >= nbytes:
                    return OwnMemory(descriptor.transport_endpoint, start, end)
    return None


def new_ranges(before: Ranges, after: Ranges) -> Ranges:
    """What of ``after`` is not in ``before``; both in ascending order."""
    new = []
    for start, end in after:
        for old_start, old_end in before:
            if old_end <= start or old_start >= end:
                continue
            if start < old_start:
                new.append((start, old_start))
            start = max(start, old_end)
        if start < end:
            new.append((start, end))
    return new
