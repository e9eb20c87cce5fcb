"""Token sequences as int32 arrays, and the one comparison that decides every hit."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
"""One-dimensional, contiguous, read-only array of token ids."""


def as_tokens(token_ids: Sequence[int]) -> TokenArray:
    """Copy token ids into a read-only int32 array.

    ``array`` converts a list of Python integers about three times faster than ``numpy.array`` does, and this runs
    once per request over the whole history.

    Raises:
        OverflowError: an id does not fit into 32 bits.
        TypeError: an element is not an integer.

    """
    tokens: TokenArray = np.array(array("i", token_ids), dtype=np.int32)
    tokens.flags.writeable = False
    return tokens


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length in tokens of the longest common prefix: one vectorised comparison, O(min(len(a), len(b)))."""
    length = min(a.size, b.size)
    if not length:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
