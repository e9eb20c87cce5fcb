"""Copying between lists of memory regions, at the speed of memory.

Everything here works on addresses: the caller answers for their being valid and for nobody changing the bytes
meanwhile. Bytes are copied and summed in one pass, outside the interpreter's lock.
"""

import ctypes
from collections.abc import Sequence

from userkv.store.backend import Region
from userkv.store.checksum import Checksum


def total_bytes(regions: Sequence[Region]) -> int:
    """Bytes of all regions together."""
    return sum(nbytes for _, nbytes in regions)


def view(region: Region) -> memoryview:
    """The region's memory as writable bytes, without a copy."""
    return memoryview((ctypes.c_char * region.nbytes).from_address(region.address)).cast("B")


def region_of(buffer: bytearray | memoryview) -> Region:
    """Where a writable buffer lies; the caller keeps the buffer alive and does not resize it."""
    nbytes = len(buffer)
    return Region(ctypes.addressof((ctypes.c_char * nbytes).from_buffer(buffer)) if nbytes else 0, nbytes)


def overlap(regions: Sequence[Region]) -> bool:
    """Whether a byte of memory lies in more than one of the regions."""
    end = 0
    for address, nbytes in sorted(regions):
        if address < end:
            return True
        end = address + nbytes
    return False


class Cursor:
    """Walks along the bytes of a list of regions, as if they were one."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._rest = iter(regions)
        self._address = 0
        self._nbytes = 0

    def take(self, nbytes: int, most: int | None = None) -> list[Region]:
        """Where the next ``nbytes`` bytes lie; fewer at the end, or if they lie in more than ``most`` places."""
        taken: list[Region] = []
        while nbytes and (most is None or len(taken) < most):
            if not self._nbytes:
                region = next(self._rest, None)
                if region is None:
                    break
                self._address, self._nbytes = region
                continue
            size = min(nbytes, self._nbytes)
            taken.append(Region(self._address, size))
            self._address += size
            self._nbytes -= size
            nbytes -= size
        return taken


def gather(parts: Sequence[Region], solid: Sequence[Region]) -> int:
    """Copy ``parts`` into ``solid``, which has as many bytes and no byte twice.

    Returns:
        The checksum of the bytes.

    """
    state = Checksum()
    state.copy(solid, parts, into_solid=True)
    return state.value()


def scatter(solid: Sequence[Region], parts: Sequence[Region]) -> int:
    """Copy ``solid`` into ``parts``, which have as many bytes; the same memory may occur in ``parts`` more than once.

    Returns:
        The checksum of the bytes of ``solid``.

    """
    state = Checksum()
    state.copy(solid, parts, into_solid=False)
    return state.value()
