"""Host memory with an exact budget: one mapping, cut into pages.

An object of a page or more takes whole pages, wherever they are free, so nothing fragments; pages are used again, so
the kernel clears each of them once. Smaller objects (records, short extents) lie on the heap; a page is lent for every
page's worth of them, and its memory is given back to the kernel meanwhile.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from userkv.core.errors import IntegrityError, InvalidOptionError
from userkv.core.sizes import KIB
from userkv.store.backend import Region

PAGE = 256 * KIB
"""Large enough to copy at full speed, small enough that the partly used last page of an object costs little."""

SMALL_OVERHEAD = 192
"""What a small object takes on the heap beside its bytes."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory of one object.

    Attributes:
        regions: where its bytes go, in order.
        cost: bytes of the budget that it takes.
        pages: the pages that it takes.
        heap: the memory of a small object, which takes no pages.
        readers: operations that use the memory just now.
        orphan: no object has the memory any more; its last reader frees it.

    """

    regions: Sequence[Region]
    cost: int
    pages: Sequence[int] = ()
    heap: npt.NDArray[np.uint8] | None = None
    readers: int = 0
    orphan: bool = False


class Arena:
    """The memory. Not thread-safe: the owner's lock guards it; copying into blocks needs no lock.

    Args:
        nbytes: the budget; what is beyond the last whole page stays unused. The kernel is asked for a page's memory
            when it is used first.
        page_bytes: a multiple of 4096.

    Raises:
        InvalidOptionError: this machine does not have so much memory.

    """

    def __init__(self, nbytes: int, page_bytes: int = PAGE) -> None:
        self.budget = nbytes // page_bytes * page_bytes
        self._page = page_bytes
        self._free: list[int] = []
        self._lent: list[int] = []
        self._heap_bytes = 0
        if not self.budget:
            return
        try:
            self._memory = mmap.mmap(-1, self.budget, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise InvalidOptionError(
                "local_dram_bytes", f"is {nbytes}, which this machine does not give ({error.strerror}): set fewer"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._free.extend(range(self.budget // page_bytes - 1, -1, -1))
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def used(self) -> int:
        """Bytes of the budget that are taken."""
        return self.budget - len(self._free) * self._page

    def cost(self, nbytes: int) -> int:
        """Bytes of the budget that an object of ``nbytes`` takes."""
        return -(-nbytes // self._page) * self._page if nbytes >= self._page else nbytes + SMALL_OVERHEAD

    def allocate(self, nbytes: int) -> Block | None:
        """Memory for an object; ``None`` if there is not enough."""
        cost = self.cost(nbytes)
        if nbytes < self._page:
            return self._allocate_small(nbytes, cost)
        count = cost // self._page
        if count > len(self._free):
            return None
        pages = sorted(self._free[-count:])
        del self._free[-count:]
        return Block(self._regions(pages, nbytes), cost, pages)

    def free(self, block: Block) -> None:
        """Take memory back; nobody reads or writes it any more."""
        self._free.extend(reversed(block.pages))
        if block.heap is not None:
            self._heap_bytes -= block.cost
            while len(self._lent) > self._pages_lent(self._heap_bytes):
                self._free.append(self._lent.pop())

    def close(self) -> None:
        """Give all memory back to the kernel; nobody uses a block any more."""
        if self.budget:
            self._memory.close()

    def check_integrity(self, blocks: Sequence[Block]) -> None:
        """For tests: ``blocks`` are all there are.

        Raises:
            IntegrityError: a page is lost, or taken twice.

        """
        pages = sorted([page for block in blocks for page in block.pages] + self._free + self._lent)
        heap_bytes = sum(block.cost for block in blocks if block.heap is not None)
        books = (heap_bytes, self._pages_lent(heap_bytes))
        if pages != list(range(self.budget // self._page)) or books != (self._heap_bytes, len(self._lent)):
            raise IntegrityError(f"pages {pages} and {heap_bytes} bytes of small objects do not add up")

    def _allocate_small(self, nbytes: int, cost: int) -> Block | None:
        missing = self._pages_lent(self._heap_bytes + cost) - len(self._lent)
        if missing > len(self._free):
            return None
        for _ in range(missing):
            page = self._free.pop()
            self._lent.append(page)
            if hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED, page * self._page, self._page)
        self._heap_bytes += cost
        heap = np.empty(nbytes, np.uint8)
        return Block((Region(heap.ctypes.data, nbytes),), cost, heap=heap)

    def _pages_lent(self, heap_bytes: int) -> int:
        return -(-heap_bytes // self._page)

    def _regions(self, pages: Sequence[int], nbytes: int) -> list[Region]:
        """The first ``nbytes`` of the pages; neighbours become one region."""
        regions: list[Region] = []
        for page in pages:
            address = self._base + page * self._page
            size = min(self._page, nbytes)
            nbytes -= size
            if regions and sum(regions[-1]) == address:
                regions[-1] = Region(regions[-1].address, regions[-1].nbytes + size)
            else:
                regions.append(Region(address, size))
        return regions
