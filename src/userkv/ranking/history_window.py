"""Where a history that is longer than a model's window is cut, so that its beginning rarely changes.

A cached history is of use as long as it is a prefix of the next one. Cutting to the last ``max_items`` would change
the first item with every new one, and no prefix would ever be found again. So the window grows to ``max_items``
and then loses its ``drop_items`` oldest at once: of ``drop_items`` new items, one is a miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from userkv.core.errors import InvalidSettingError

T = TypeVar("T")

DROPPED_PART = 4
"""By default, a window drops a quarter of itself at once."""


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """The part of a history that a model sees.

    It holds no state: where a history is cut depends on its length alone, counted from the user's very first item, so
    all clients and servers cut equally. Whoever keeps only the end of a history must keep its full length too
    (:meth:`start`).

    Attributes:
        max_items: most items, at least 1.
        drop_items: items that go at once, from 1 to ``max_items``. 1 cuts to the last ``max_items``.

    """

    max_items: int
    drop_items: int

    def __post_init__(self) -> None:
        for name, value in (("max_items", self.max_items), ("drop_items", self.drop_items)):
            if type(value) is not int or value < 1:
                raise InvalidSettingError(f"a history window's {name} must be a whole number of at least 1: {value!r}")
        if self.drop_items > self.max_items:
            raise InvalidSettingError(
                f"a history window of {self.max_items} items cannot drop {self.drop_items}; drop at most all of it"
            )

    @classmethod
    def of(cls, max_items: int) -> "HistoryWindow":
        """The window of a size that drops the usual part.

        Raises:
            InvalidSettingError: the size is no whole number of at least 1.

        """
        return cls(max_items, max(1, max_items // DROPPED_PART) if type(max_items) is int else max_items)

    def start(self, length: int) -> int:
        """How many of the oldest items of a history of ``length`` items are left out."""
        excess = max(0, length - self.max_items)
        return -(-excess // self.drop_items) * self.drop_items

    def cut(self, items: Sequence[T]) -> Sequence[T]:
        """The items that the model sees: the newest, as many as :meth:`start` leaves."""
        return items[self.start(len(items)) :]
