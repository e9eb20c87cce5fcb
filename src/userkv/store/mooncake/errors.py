"""Mooncake's error codes, and what they mean to a caller of the pool."""

from typing import Final

from userkv.store.backend import ObjectMissingError, PoolFullError, PoolUnavailableError, StoreError

OK: Final = 0
NO_SPACE: Final = -200
INVALID: Final = -600
NOT_READY: Final = -703
MISSING: Final = -704
LEASED: Final = -706
BUSY: Final = -714
TRANSFER_FAILED: Final = -800
UNREACHABLE: Final = -900

NAMES = {
    -1: "internal error",
    NO_SPACE: "no room in any segment",
    INVALID: "invalid parameters",
    -601: "client unknown to the master",
    -700: "write not allowed",
    -702: "no replica that can be read like this",
    NOT_READY: "somebody writes it right now",
    MISSING: "no such object",
    -705: "object exists",
    LEASED: "leased by a reader",
    -707: "lease expired while it was read",
    -708: "being copied or offloaded",
    -710: "no such replica",
    -712: "replica is gone",
    BUSY: "replica in use",
    TRANSFER_FAILED: "transfer failed",
    UNREACHABLE: "the master, or the owner of a file, cannot be reached",
    -901: "the master did not answer in time",
}
"""Codes that Mooncake 0.3.13 returns (``ErrorCode`` in mooncake-store/include/types.h), in words."""

GONE = frozenset({NOT_READY, MISSING, -710, -712})
"""To a reader: there is no such object. What is being written for the first time does not exist yet."""

STILL_THERE = frozenset({NOT_READY, LEASED, -708, BUSY})
"""To somebody who removes: it exists, and others use it."""

PASSING = frozenset({NO_SPACE, NOT_READY, -708, BUSY})
"""To a writer: it may work in a moment, when something was evicted or others have finished."""


def describe(code: int) -> str:
    """A code in words, with its number."""
    return f"{NAMES.get(code, 'error')} ({code})"


def error_of(code: int, what: str) -> StoreError:
    """The error to raise when an operation on an object returned ``code``.

    Args:
        code: what Mooncake returned, negative.
        what: what was done to which object.

    """
    message = f"{what}: {describe(code)}"
    if code in GONE:
        return ObjectMissingError(message)
    if code == NO_SPACE:
        return PoolFullError(message)
    return PoolUnavailableError(message)
