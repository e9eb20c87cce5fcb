"""Item ids as token ids: a documented, stateless, collision-free code.

An item id is written as ``digits`` digits to the base ``base``, most significant digit first. The digit at position
``p`` uses a token range of its own, ``[reserved + p * base, reserved + (p + 1) * base)``, in the manner of semantic
ids. A token therefore tells which position it belongs to, two items never share a code, and no code is the beginning
of another one. The ``reserved`` lowest token ids are never used (they are the model's special tokens).

The code needs no table: every process, today or next year, maps the same item to the same tokens, which is what lets
the cached history of a user be found again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from userkv.core.errors import InvalidSettingError

DEFAULT_RESERVED = 16
"""Lowest token ids that no item uses."""

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ItemCodec:
    """Maps item ids ``0 .. capacity - 1`` to ``digits`` token ids each, and back.

    base: number of values of one digit. digits: tokens per item. reserved: lowest token ids left unused.
    Raises InvalidSettingError if a number is out of range. Use :meth:`for_vocab` to fit a vocabulary.
    """

    base: int
    digits: int
    reserved: int = DEFAULT_RESERVED

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise InvalidSettingError(f"An item needs at least 1 digit (token), not {self.digits}.")
        if self.reserved < 0:
            raise InvalidSettingError(f"The number of reserved token ids must not be negative, but is {self.reserved}.")
        if self.base < 2:
            raise InvalidSettingError(f"The base of the item code must be at least 2, but is {self.base}.")

    @classmethod
    def for_vocab(cls, vocab_size: int, digits: int = 2, reserved: int = DEFAULT_RESERVED) -> ItemCodec:
        """The code with the largest capacity whose tokens are all below ``vocab_size``.

        Raises InvalidSettingError if the vocabulary is too small for ``digits`` digits.
        """
        if digits < 1:
            raise InvalidSettingError(f"An item needs at least 1 digit (token), not {digits}.")
        base = (vocab_size - reserved) // digits
        if base < 2:
            raise InvalidSettingError(
                f"A vocabulary of {vocab_size} tokens, {reserved} of them reserved, is too small for items of {digits} "
                f"digits: use fewer digits or a vocabulary of at least {reserved + 2 * digits}."
            )
        return cls(base=base, digits=digits, reserved=reserved)

    @property
    def capacity(self) -> int:
        """Number of different items; the largest item id is one less."""
        capacity: int = self.base**self.digits
        return capacity

    @property
    def tokens_per_item(self) -> int:
        """Number of token ids that one item takes."""
        return self.digits

    def encode(self, item: SupportsIndex) -> tuple[int, ...]:
        """The token ids of one item. Raises InvalidSettingError if it is no integer in ``0 .. capacity - 1``."""
        try:
            rest = operator.index(item)
        except TypeError:
            raise InvalidSettingError(f"An item id must be an integer, not {item!r}.") from None
        if not 0 <= rest < self.capacity:
            raise self._out_of_range(rest)
        tokens = []
        for position in reversed(range(self.digits)):
            rest, digit = divmod(rest, self.base)
            tokens.append(self.reserved + position * self.base + digit)
        return tuple(reversed(tokens))

    def encode_many(self, items: Sequence[SupportsIndex] | np.ndarray) -> list[int]:
        """The token ids of all items, one after the other. Raises InvalidSettingError like :meth:`encode`."""
        if len(items) == 0:
            return []
        ids = np.asarray(items)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.max()) > _INT64_MAX:
            # Not machine integers (floats, text, or numbers beyond 64 bits): one by one, each checked exactly.
            return [token for item in items for token in self.encode(item)]
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self.capacity:
            raise self._out_of_range(smallest if smallest < 0 else largest)
        rest = ids.astype(np.int64)
        codes = np.empty((len(rest), self.digits), dtype=np.int64)
        for position in reversed(range(self.digits)):
            rest, digit = np.divmod(rest, self.base)
            codes[:, position] = digit + (self.reserved + position * self.base)
        tokens: list[int] = codes.ravel().tolist()
        return tokens

    def decode(self, tokens: Sequence[int]) -> list[int]:
        """The item ids of a token sequence that :meth:`encode_many` could have made; otherwise InvalidSettingError."""
        if len(tokens) % self.digits:
            raise InvalidSettingError(
                f"{len(tokens)} tokens are no whole number of items of {self.digits} tokens each."
            )
        items = []
        item = 0
        for index, token in enumerate(tokens):
            position = index % self.digits
            digit = token - self.reserved - position * self.base
            if not 0 <= digit < self.base:
                raise InvalidSettingError(
                    f"Token {token} at index {index} does not belong to digit {position} of an item."
                )
            item = item * self.base + digit
            if position == self.digits - 1:
                items.append(item)
                item = 0
        return items

    def _out_of_range(self, item: int) -> InvalidSettingError:
        if item < 0:
            return InvalidSettingError(
                f"Item id {item} is negative; this code takes 0 to {self.capacity - 1} (renumber the items)."
            )
        return InvalidSettingError(
            f"Item id {item} does not fit: {self.digits} digits to the base {self.base} give {self.capacity} items "
            "(ids from 0), so use more digits per item or a larger vocabulary."
        )
