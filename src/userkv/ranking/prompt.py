"""The ranking prompt: a user's history, then candidates that see the history and themselves, never each other.

Token ids::

    [history item][history item]...[candidate][candidate]...

Every candidate begins with a token that occurs nowhere else, so the tokens alone say where the history ends and which
tokens belong together. There are two ways to begin one:

- ``offset``: the first token of the item, moved by ``candidate_offset`` into a range of its own. An item of one token
  then is a candidate of one token. For models that are trained with it (HSTU).
- ``marker``: a reserved token before the item's own tokens. For models whose vocabulary has no such range (Qwen3).

A model says in its ``config.json`` under ``userkv_ranking`` how it does that (:class:`RankingFormat`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from userkv.core.errors import InvalidSettingError, InvalidUserRequestError
from userkv.ranking.config_keys import CONFIG_KEY

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

MAX_ITEM_TOKENS = 32
"""Tokens of an item at most, unless a model says otherwise: attention makes room in all rows for the widest one."""

HISTORY = -1
"""In the second row of :meth:`RankingFormat.positions`: a token of the history."""


@dataclass(frozen=True, slots=True)
class RankingFormat:
    """How a model's candidates begin. Exactly one of the two ways is set.

    Attributes:
        candidate_offset: what is added to the first token of an item; all items' tokens are below it.
        candidate_marker: the token before a candidate.

    """

    candidate_offset: int | None = None
    candidate_marker: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("offset", self.candidate_offset), ("marker", self.candidate_marker)):
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidSettingError(f"{CONFIG_KEY}: candidate_{name} must be a token id, not {value!r}")
        if (self.candidate_offset is None) == (self.candidate_marker is None):
            raise InvalidSettingError(f"{CONFIG_KEY} needs either candidate_offset or candidate_marker")

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> "RankingFormat":
        """From the section ``userkv_ranking`` of a model's ``config.json``.

        Raises:
            InvalidSettingError: it is not one.

        """
        return cls(section.get("candidate_offset"), section.get("candidate_marker"))

    def candidate(self, item: Sequence[int]) -> list[int]:
        """The tokens of a candidate, from the tokens of its item."""
        if self.candidate_offset is not None:
            return [item[0] + self.candidate_offset, *item[1:]]
        assert self.candidate_marker is not None
        return [self.candidate_marker, *item]

    def is_start(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which tokens begin a candidate, and so are reserved: they never occur in items."""
        if self.candidate_offset is not None:
            return tokens >= self.candidate_offset
        assert self.candidate_marker is not None
        marked: npt.NDArray[np.bool_] = tokens == self.candidate_marker
        return marked

    def starts(self, token_ids: Tokens) -> npt.NDArray[np.int64]:
        """Where the candidates of a prompt begin."""
        return np.flatnonzero(self.is_start(np.asarray(token_ids, np.int64)))

    def positions(self, token_ids: Tokens) -> npt.NDArray[np.int64]:
        """What attention has to know of each token.

        Returns:
            int64, shape ``[3, tokens]``: the logical position (a candidate's tokens continue the history's, as if no
            other candidate were there); where the token's own candidate begins, or :data:`HISTORY`; the history's
            length, the same for all.

        """
        num_tokens = len(token_ids)
        starts = self.starts(token_ids)
        history_len = int(starts[0]) if len(starts) else num_tokens
        positions = np.empty((3, num_tokens), np.int64)
        positions[0] = np.arange(num_tokens)
        positions[1] = HISTORY
        positions[2] = history_len
        if len(starts):
            lengths = np.diff(np.append(starts, num_tokens))
            own = np.repeat(starts, lengths)
            positions[1, history_len:] = own
            positions[0, history_len:] += history_len - own
        return positions

    def check(
        self,
        token_ids: Tokens,
        history_len: int | None = None,
        max_history_tokens: int | None = None,
        max_item_tokens: int | None = None,
    ) -> None:
        """Refuse a prompt that a model cannot rank, or whose history is not what it says.

        Args:
            token_ids: the prompt.
            history_len: how much of it is said to be history; ``None``: nothing is said.
            max_history_tokens: longest history.
            max_item_tokens: longest item; a marker before a candidate is no part of it.

        Raises:
            InvalidUserRequestError: it is one.

        """
        starts = self.starts(token_ids)
        end = int(starts[0]) if len(starts) else len(token_ids)
        if history_len is not None and history_len != end:
            raise InvalidUserRequestError(
                f"history_len is {history_len}, but the first candidate begins at token {end}; send history_len={end}"
            )
        if max_history_tokens is not None and end > max_history_tokens:
            raise InvalidUserRequestError(
                f"the history has {end} tokens and the model takes {max_history_tokens}; send its end only"
            )
        if not len(starts):
            return
        marker = self.candidate_marker is not None
        sizes = np.diff(starts, append=len(token_ids)) - marker
        if sizes.min() < 1:
            raise InvalidUserRequestError(f"a candidate at token {int(starts[sizes.argmin()])} has no item's tokens")
        if max_item_tokens is not None and sizes.max() > max_item_tokens:
            raise InvalidUserRequestError(
                f"the candidate at token {int(starts[sizes.argmax()])} has {int(sizes.max())} tokens; the model takes "
                f"{max_item_tokens}"
            )


@dataclass(frozen=True, slots=True)
class RankingPrompt:
    """A prompt to rank.

    Attributes:
        token_ids: history and candidates.
        history_len: tokens of the history.
        num_candidates: candidates.

    """

    token_ids: list[int]
    history_len: int
    num_candidates: int
