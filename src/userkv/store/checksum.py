"""Checksums of KV bytes, 64 bits, which detect accidents at memory speed. They are no defence against forgery.

The bytes count as little-endian words of 64 bits, zeros filling up the last one. With ``x`` = the word XOR the number
of its place times the golden ratio, the checksum is the sum of ``(x mod 2**32) * (x >> 32) + x`` modulo 2**64: NH, the
universal hash function of UMAC, with a sequence for a key, and the word itself added. So what lies at another place
counts differently; damage within any one half of a word is always found, and of other damage all but one in 2**32
cases or fewer.
"""

import sys
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from userkv.store.backend import Region

NAME = "NH"
"""Part of the pool's namespace: engines with another checksum do not find each other's objects."""

_WORD = 8
_ZEROS = np.zeros(1, np.uint64)


class Checksum:
    """The checksum of bytes that come one after the other. Not thread-safe; sums outside the interpreter's lock."""

    def __init__(self) -> None:
        self._state = np.zeros(3, np.uint64)

    def add(self, parts: Sequence[Region]) -> None:
        """Go on with the bytes of ``parts``."""
        from userkv.store import kernels  # Not before: in a process with llvmlite, no CPU worker of vLLM 0.32 starts.

        kernels.add(_rows(parts), self._state)

    def copy(self, solid: Sequence[Region], parts: Sequence[Region], into_solid: bool) -> None:
        """Copy ``parts`` to ``solid``, or the other way round, and go on with these bytes.

        Raises:
            ValueError: one has more bytes than the other.

        """
        from userkv.store import kernels

        rows = _rows(solid), _rows(parts)
        if rows[0][:, 1].sum() != rows[1][:, 1].sum():  # The kernel would go on with whatever lies behind the rows.
            raise ValueError("both sides of a copy must have as many bytes")
        kernels.copy(*rows, into_solid, self._state)

    def value(self) -> int:
        """The checksum; nothing can be added any more."""
        missing = -int(self._state[1]) % _WORD
        if missing:
            self.add([Region(_ZEROS.ctypes.data, missing)])
        return int(self._state[0])


def checksum(parts: Sequence[Region]) -> int:
    """The checksum of the bytes of ``parts``, one after the other."""
    state = Checksum()
    state.add(parts)
    return state.value()


def prepare() -> None:
    """Compile now, which takes one to three seconds, what would be compiled at the first use.

    Raises:
        NotImplementedError: the CPU is big-endian.

    """
    if sys.byteorder != "little":  # Whole words are read as the CPU reads them, single bytes as the definition says.
        raise NotImplementedError("UserKV's pool needs a little-endian CPU")
    state = Checksum()
    state.add(())
    state.copy((), (), into_solid=True)


def _rows(parts: Sequence[Region]) -> npt.NDArray[np.uint64]:
    return np.fromiter(chain.from_iterable(parts), np.uint64, 2 * len(parts)).reshape(-1, 2)
