"""How much a user is worth keeping: the number of its requests, where older requests count less."""

from collections.abc import Hashable, Sequence
from math import exp2, log2

DEFAULT_SLOTS = 1 << 19
"""6 MiB for three half-lives; unused slots take no memory."""

_NEVER = 0.0
"""The worth of a slot that was never written."""

_FIRST = 64.0
"""A worth of one request at time zero: so far above :data:`_NEVER` that adding an unwritten slot changes nothing."""

_LAST = 4096.0
"""The largest worth. Single precision resolves a few ten-thousandths of a request up to here."""


class RequestWorth:
    """Exponentially decaying counts of requests, one for each half-life, of all users, held or not.

    A request at time *t* counts ``2 ** (t / half_life)``, and a user's worth is the logarithm (to base 2) of its sum.
    So all worths decay together and none has to be touched when time passes. With a short half-life the order of worths
    is that of the last requests (LRU), with a long one that of the numbers of requests (LFU). The idea is that of LRFU
    (Lee et al., IEEE Transactions on Computers 50(12), 2001).

    Users are not stored: the hash of a user chooses its slot in a table of fixed size. Two users in one slot add up, so
    both seem worth more than they are. A user that comes once leaves something in its slot for some half-lives. Where
    half of all requests are of such users, fifty slots for each user that the cache holds keep most of what counting
    gains over LRU, and one slot keeps nothing of it (``test_adaptive.py``). No memory grows with the number of users
    ever seen, and nothing that names a deleted user remains. Which users share a slot differs between processes, as
    Python's hashes of text do. So a client cannot choose user names that spoil the order of others.

    Not thread-safe. All operations are O(1), except that one request in many thousands moves the zero of all worths.

    Args:
        half_lives: in units of the times that :meth:`count` gets.
        slots: a power of two.

    """

    def __init__(self, half_lives: tuple[float, ...], slots: int = DEFAULT_SLOTS) -> None:
        if slots < 1 or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two, not {slots}")
        self.half_lives = half_lives
        self._mask = slots - 1
        self._zero, self._end = 0.0, self._span()
        # Zeroed pages take no memory until they are written.
        self._rows = [(1.0 / half_life, memoryview(bytearray(4 * slots)).cast("f")) for half_life in half_lives]

    def count(self, user: Hashable, time: float) -> None:
        """Count a request of ``user``; ``time`` must not decrease from call to call."""
        if time > self._end:
            self._move_zero(time)
        slot = hash(user) & self._mask
        since = time - self._zero
        for per_half_life, worths in self._rows:
            now = _FIRST + since * per_half_life
            # log2(2**now + 2**before), where before is not much above now, if at all.
            worths[slot] = now + log2(1.0 + exp2(worths[slot] - now))

    def slot_of(self, user: Hashable) -> int:
        """The slot of ``user`` in every row."""
        return hash(user) & self._mask

    def by(self, which: int) -> Sequence[float]:
        """The worths by the half-life of number ``which``, by slot; only comparisons between them have a meaning."""
        return self._rows[which][1]

    def _move_zero(self, time: float) -> None:
        import numpy as np  # Here, since the command line reads the settings alone and need not wait for this import.

        for per_half_life, worths in self._rows:
            values = np.asarray(worths)
            np.maximum(values - np.float32((time - self._zero) * per_half_life), _NEVER, out=values)
        self._zero, self._end = time, time + self._span()

    def _span(self) -> float:
        """How long worths stay below :data:`_LAST`."""
        return (_LAST - _FIRST) * min(self.half_lives)
