"""Memory that the transport knows, for what has no place in the engine's: headers, records, bytes nobody wants."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from userkv.store.backend import PoolFullError, PoolUnavailableError

ALIGNMENT = 64
PATIENCE = 1.0
"""Seconds to wait until others return memory."""


class Arena:
    """Lends pieces of one registered region, first fit. Thread-safe.

    Args:
        address: where the region begins, aligned to 64 bytes; whoever made it keeps it alive.
        nbytes: its size.

    """

    def __init__(self, address: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free = [(address, nbytes)]  # By address; no two of them touch.
        self._returned = threading.Condition()

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[int]:
        """Borrow ``nbytes`` bytes for a ``with`` block; their contents are arbitrary.

        Raises:
            PoolFullError: the region is smaller than that.
            PoolUnavailableError: others have the memory, and do not return it soon.

        """
        nbytes = max(nbytes + -nbytes % ALIGNMENT, ALIGNMENT)
        if nbytes > self._nbytes:
            raise PoolFullError(
                f"{nbytes} bytes do not fit into a buffer of {self._nbytes}; set local_buffer_size higher"
            )
        address = self._take(nbytes)
        try:
            yield address
        finally:
            self._give(address, nbytes)

    def _take(self, nbytes: int) -> int:
        deadline = time.monotonic() + PATIENCE
        with self._returned:
            while True:
                for index, (address, size) in enumerate(self._free):
                    if size >= nbytes:
                        rest = [(address + nbytes, size - nbytes)] if size > nbytes else []
                        self._free[index : index + 1] = rest
                        return address
                if not self._returned.wait(deadline - time.monotonic()):
                    raise PoolUnavailableError("all of the transfer buffer is in use; set local_buffer_size higher")

    def _give(self, address: int, nbytes: int) -> None:
        with self._returned:
            merged: list[tuple[int, int]] = []
            for start, size in sorted([*self._free, (address, nbytes)]):
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((start, size))
            self._free = merged
            self._returned.notify_all()
