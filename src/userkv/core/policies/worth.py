"""How much a user is worth keeping: how often he was requested, where older requests count less."""

from array import array
from collections.abc import Hashable, Sequence
from math import exp2, inf, log2

DEFAULT_SLOTS = 1 << 16


class RequestWorth:
    """Exponentially decaying counts of requests, one for each half-life, of users who are held and of others.

    A request at time *t* counts ``2 ** (t / half_life)``, and a user's worth is the logarithm (to base 2) of his sum.
    So all worths decay together and none has to be touched when time passes. With a short half-life the order of worths
    is that of the last requests (LRU), with a long one that of the numbers of requests (LFU). The idea is that of LRFU
    (Lee et al., IEEE Transactions on Computers 50(12), 2001).

    Users are not stored: each has a slot that his hash names, in a table of fixed size. Two users in one slot add up,
    so both seem worth more than they are; with four slots per user that the cache holds this is rare. Nothing grows
    with the number of users that were ever seen, and of one who was deleted nothing remains that names him.

    Not thread-safe. All operations are O(1).

    Args:
        half_lives: in units of the times that :meth:`note` is given.
        slots: a power of two.

    """

    def __init__(self, half_lives: tuple[float, ...], slots: int = DEFAULT_SLOTS) -> None:
        if slots < 1 or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two, not {slots}")
        self.half_lives = half_lives
        self._mask = slots - 1
        self._rows = [(1.0 / half_life, array("d", [-inf]) * slots) for half_life in half_lives]

    def note(self, user: Hashable, time: float) -> None:
        """A request of ``user``; ``time`` never decreases."""
        slot = hash(user) & self._mask
        for per_half_life, worths in self._rows:
            now = time * per_half_life
            # log2(2**now + 2**before), where before is not much above now, if at all.
            worths[slot] = now + log2(1.0 + exp2(worths[slot] - now))

    def slot_of(self, user: Hashable) -> int:
        """Where the worths of ``user`` are."""
        return hash(user) & self._mask

    def by(self, which: int) -> Sequence[float]:
        """The worths by the half-life of number ``which``, by slot; to be compared, not to be understood."""
        return self._rows[which][1]
