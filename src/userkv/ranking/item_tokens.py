"""Many items to tokens at once, for requests of thousands of items: no numpy call per item."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from userkv.ranking.prompt import RankingFormat


class ItemVocabulary(Protocol):
    """From item ids to tokens."""

    def tokens(self, item: int) -> Sequence[int]:
        """An item's tokens.

        Raises:
            InvalidUserRequestError: there is no such item.

        """

    def tokens_of_all(self, items: Sequence[int]) -> list[int]:
        """The tokens of items, one after the other; all items have equally many.

        Raises:
            InvalidUserRequestError: there is no such item.

        """


@dataclass(frozen=True, slots=True)
class ItemTokens:
    """Items, one after the other.

    Attributes:
        tokens: int64, of all items.
        lengths: int64, tokens of each item.

    """

    tokens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def as_candidates(self, form: RankingFormat) -> npt.NDArray[np.int64]:
        """The tokens of the items as candidates: what ``RankingFormat.candidate`` makes of each."""
        starts = np.cumsum(self.lengths) - self.lengths
        if form.candidate_marker is not None:
            return np.insert(self.tokens, starts, form.candidate_marker)
        assert form.candidate_offset is not None
        tokens = self.tokens.copy()
        tokens[starts] += form.candidate_offset
        return tokens


def lay_out(items: Sequence[Any], vocabulary: ItemVocabulary) -> ItemTokens | None:
    """The tokens of items, which are item ids or lists of tokens; ``None`` if one of them is neither.

    Tokens are integers of 64 bits, and otherwise unchecked.

    Raises:
        InvalidUserRequestError: there is no such item.

    """
    kinds = set(map(type, items))
    if not kinds:
        return join([])
    if kinds == {int}:
        tokens = vocabulary.tokens_of_all(items)
        return ItemTokens(np.asarray(tokens, np.int64), np.full(len(items), len(tokens) // len(items), np.int64))
    if not kinds <= {int, list, tuple}:
        return None
    return join([vocabulary.tokens(item) if type(item) is int else item for item in items])


def join(parts: Sequence[Sequence[Any]]) -> ItemTokens | None:
    """Items of which the tokens are known; ``None`` if they are no integers of 64 bits."""
    tokens = list(chain.from_iterable(parts))
    if not set(map(type, tokens)) <= {int}:
        return None
    try:
        return ItemTokens(np.asarray(tokens, np.int64), np.fromiter(map(len, parts), np.int64, len(parts)))
    except OverflowError:
        return None
