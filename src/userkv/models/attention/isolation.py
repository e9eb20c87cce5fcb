"""Which keys each row of a step sees: worked out once per step, used by all layers. Pure PyTorch.

A *row* is a token that the step computes. Rows of the history see what lies before them; a row of a candidate sees the
whole history and what lies before it in its own candidate, wherever in the step, or in an earlier one, that was
computed. So everything is read from the paged KV cache, to which the step's own keys have been written before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class CandidateRows:
    """The rows of a request's candidates.

    Attributes:
        first: the first of them among the step's rows; the others follow.
        last: behind the last one.
        logical: int64 ``[rows]``, their logical positions, from the history's length on.
        own_blocks: int64 ``[rows, width]``, where the keys of a row's own candidate lie: the engine's block ...
        own_offsets: ... and the place in it.
        own_distance: int64 ``[rows, width]``, how far such a key lies before the row; negative: it is not seen.

    """

    first: int
    last: int
    logical: torch.Tensor
    own_blocks: torch.Tensor
    own_offsets: torch.Tensor
    own_distance: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """The rows of one request in a step.

    Attributes:
        first: its first row; rows of the history come first.
        history_end: behind its last row of the history.
        computed: tokens whose KV is there before the step: the index of the first row in the request.
        history_len: tokens of the history.
        blocks: int64, the engine's blocks that hold the history, as far as there is one by the end of the step.
        candidates: its rows of candidates, if there are any.

    """

    first: int
    history_end: int
    computed: int
    history_len: int
    blocks: torch.Tensor
    candidates: CandidateRows | None

    @property
    def has_history_rows(self) -> bool:
        """Whether the step computes a part of the history."""
        return self.history_end > self.first


@dataclass(frozen=True, slots=True, eq=False)
class IsolationPlan:
    """All requests of a step."""

    requests: tuple[RequestRows, ...]

    @property
    def has_history_rows(self) -> bool:
        """Whether the step computes a part of any history."""
        return any(request.has_history_rows for request in self.requests)


def plan_isolation(
    positions: torch.Tensor,
    row_starts: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    block_size: int,
) -> IsolationPlan:
    """Work out a step.

    Args:
        positions: int64 ``[3, rows]``, see :meth:`RankingFormat.positions`.
        row_starts: where each request's rows begin, and where the last one's end.
        seq_lens: tokens of each request by the end of the step.
        block_table: integer ``[requests, blocks]``, the engine's blocks of each request in order.
        block_size: tokens per block.

    """
    requests = []
    for number, seq_len in enumerate(seq_lens):
        first, last = row_starts[number], row_starts[number + 1]
        if first == last:
            continue
        computed = seq_len - (last - first)
        history_len = int(positions[2, first])
        history_end = first + min(max(history_len - computed, 0), last - first)
        blocks = block_table[number]
        rows = None
        if history_end < last:
            rows = _candidate_rows(positions[:, history_end:last], history_end, computed - first, blocks, block_size)
        num_blocks = -(-min(history_len, seq_len) // block_size)
        requests.append(RequestRows(first, history_end, computed, history_len, blocks[:num_blocks].long(), rows))
    return IsolationPlan(tuple(requests))


def _candidate_rows(
    positions: torch.Tensor, first: int, shift: int, blocks: torch.Tensor, block_size: int
) -> CandidateRows:
    """``shift``: from the number of a row to its index in the request."""
    last = first + positions.shape[1]
    index = torch.arange(first + shift, last + shift, device=positions.device)
    starts = positions[1]
    width = int((index - starts).max()) + 1
    own = starts.unsqueeze(1) + torch.arange(width, device=positions.device)
    distance = index.unsqueeze(1) - own
    own = own.where(distance >= 0, starts.unsqueeze(1))  # Somewhere harmless.
    return CandidateRows(first, last, positions[0], blocks[own // block_size].long(), own % block_size, distance)
