"""How much a user is worth keeping: how often he was requested, where older requests count less."""

from collections.abc import Hashable, Sequence
from math import exp2, log2

DEFAULT_SLOTS = 1 << 19
"""6 MiB for three half-lives, of which only what is used takes memory."""

_NEVER = 0.0
"""What memory is filled with that nobody has written to."""

_FIRST = 64.0
"""A worth at the beginning: so far above :data:`_NEVER` that it makes no difference which of two users never came."""

_LAST = 4096.0
"""Worths are single precision: up to here, to a few ten-thousandths of a request."""


class RequestWorth:
    """Exponentially decaying counts of requests, one for each half-life, of users who are held and of others.

    A request at time *t* counts ``2 ** (t / half_life)``, and a user's worth is the logarithm (to base 2) of his sum.
    So all worths decay together and none has to be touched when time passes. With a short half-life the order of worths
    is that of the last requests (LRU), with a long one that of the numbers of requests (LFU). The idea is that of LRFU
    (Lee et al., IEEE Transactions on Computers 50(12), 2001).

    Users are not stored: each has a slot that his hash names, in a table of fixed size. Two users in one slot add up,
    so both seem worth more than they are, and whoever comes leaves something in his for some half-lives, even if he
    never comes again. Where half of all requests are of such users, fifty slots for each user that the cache holds keep
    most of what counting gains over LRU, and one slot keeps nothing of it (``test_adaptive.py``). Nothing
    grows with the number of users that were ever seen, and of one who was deleted nothing remains that names him. Which
    users share a slot differs from process to process, as Python's hashes of text do, so nobody can choose names that
    spoil the order of others.

    Not thread-safe. All operations are O(1), but one request in many thousands, which moves the zero of all worths.

    Args:
        half_lives: in units of the times that :meth:`note` is given.
        slots: a power of two.

    """

    def __init__(self, half_lives: tuple[float, ...], slots: int = DEFAULT_SLOTS) -> None:
        if slots < 1 or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two, not {slots}")
        self.half_lives = half_lives
        self._mask = slots - 1
        self._zero, self._end = 0.0, self._span()
        # Zeroed memory takes none until it is written to.
        self._rows = [(1.0 / half_life, memoryview(bytearray(4 * slots)).cast("f")) for half_life in half_lives]

    def note(self, user: Hashable, time: float) -> None:
        """A request of ``user``; ``time`` never decreases."""
        if time > self._end:
            self._move_zero(time)
        slot = hash(user) & self._mask
        since = time - self._zero
        for per_half_life, worths in self._rows:
            now = _FIRST + since * per_half_life
            # log2(2**now + 2**before), where before is not much above now, if at all.
            worths[slot] = now + log2(1.0 + exp2(worths[slot] - now))

    def slot_of(self, user: Hashable) -> int:
        """Where the worths of ``user`` are."""
        return hash(user) & self._mask

    def by(self, which: int) -> Sequence[float]:
        """The worths by the half-life of number ``which``, by slot; to be compared, not to be understood."""
        return self._rows[which][1]

    def _move_zero(self, time: float) -> None:
        import numpy as np  # Not above: whoever reads settings alone, as the command line does, need not wait for it.

        for per_half_life, worths in self._rows:
            values = np.asarray(worths)
            np.maximum(values - np.float32((time - self._zero) * per_half_life), _NEVER, out=values)
        self._zero, self._end = time, time + self._span()

    def _span(self) -> float:
        """For how long worths stay below :data:`_LAST`."""
        return (_LAST - _FIRST) * min(self.half_lives)
