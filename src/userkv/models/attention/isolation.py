"""Which keys each row of a step sees: worked out once per step, used by all layers. Pure PyTorch.

A *row* is a token that the step computes. Rows of the history see what lies before them; a row of a candidate sees the
whole history and what lies before it in its own candidate, wherever in the step, or in an earlier one, that was
computed. So everything is read from the paged KV cache, to which the step's own keys have been written before.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class HistoryRows:
    """The rows of one request that belong to its history.

    Attributes:
        first: the first of them among the step's rows; the others follow.
        last: behind the last one.
        computed: tokens whose KV is there before the step: the index of the first row in the request.
        blocks: int64, the engine's blocks that hold the history up to the last row.

    """

    first: int
    last: int
    computed: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CandidateRows:
    """The rows of all candidates behind one history, of one request or of several of the same user.

    Attributes:
        rows: int64 ``[rows]``, their places among the step's rows.
        history_len: tokens of the history.
        blocks: int64, the engine's blocks that hold it.
        logical: int64 ``[rows]``, their logical positions, from the history's length on.
        own_blocks: int64 ``[rows, width]``, where the keys of a row's own candidate lie: the engine's block ...
        own_offsets: ... and the place in it.
        own_distance: int64 ``[rows, width]``, how far such a key lies before the row; negative: it is not seen.

    """

    rows: torch.Tensor
    history_len: int
    blocks: torch.Tensor
    logical: torch.Tensor
    own_blocks: torch.Tensor
    own_offsets: torch.Tensor
    own_distance: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IsolationPlan:
    """All rows of a step. Each is in exactly one part."""

    histories: tuple[HistoryRows, ...]
    candidates: tuple[CandidateRows, ...]


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
    histories = []
    behind: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = defaultdict(list)
    for request, seq_len in enumerate(seq_lens):
        first, last = row_starts[request], row_starts[request + 1]
        if first == last:
            continue
        computed = seq_len - (last - first)
        history_len = int(positions[2, first])
        history_end = first + min(max(history_len - computed, 0), last - first)
        if first < history_end:
            size = computed + history_end - first
            histories.append(HistoryRows(first, history_end, computed, _blocks(block_table, request, size, block_size)))
        if history_end < last:
            blocks = _blocks(block_table, request, history_len, block_size)
            behind[history_len, *blocks.tolist()].append((request, history_end, last, computed - first))
    candidates = [
        _candidate_rows(positions, history_len, blocks, parts, block_table, block_size)
        for (history_len, *blocks), parts in behind.items()
    ]
    return IsolationPlan(tuple(histories), tuple(candidates))


def _blocks(block_table: torch.Tensor, request: int, size: int, block_size: int) -> torch.Tensor:
    return block_table[request, : -(-size // block_size)].long()


def _candidate_rows(
    positions: torch.Tensor,
    history_len: int,
    blocks: Sequence[int],
    parts: Sequence[tuple[int, int, int, int]],
    block_table: torch.Tensor,
    block_size: int,
) -> CandidateRows:
    """``parts``: of each request its number, first and last row, and what leads from a row to its index in it."""
    device = positions.device
    rows = torch.cat([torch.arange(first, last, device=device) for _, first, last, _ in parts])
    sizes = torch.tensor([last - first for _, first, last, _ in parts], device=device)
    requests = torch.tensor([request for request, *_ in parts], device=device).repeat_interleave(sizes)
    index = rows + torch.tensor([shift for *_, shift in parts], device=device).repeat_interleave(sizes)
    starts = positions[1, rows]
    width = int((index - starts).max()) + 1
    own = starts.unsqueeze(1) + torch.arange(width, device=device)
    distance = index.unsqueeze(1) - own
    own = own.where(distance >= 0, starts.unsqueeze(1))  # Somewhere harmless.
    own_blocks = block_table[requests.unsqueeze(1), own // block_size].long()
    return CandidateRows(
        rows,
        history_len,
        torch.tensor(blocks, dtype=torch.int64, device=device),
        positions[0, rows],
        own_blocks,
        own % block_size,
        distance,
    )
