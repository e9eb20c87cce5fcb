"""HSTU's attention over a paged KV cache: every score counts by itself, so a key that is not seen counts zero.

``out = sum over seen keys of silu(q k / sqrt(d) + bias(distance)) / n * v``, with one ``n`` for all. Pure PyTorch: on a
CPU its time is that of the matrix products; on CUDA it would run, too, but a fused kernel would be faster.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from userkv.models.attention.isolation import CandidateRows, HistoryRows, IsolationPlan

TILE = 64
"""Rows at once: their scores stay in the CPU's cache, and causal ones skip most keys behind them."""


def silu_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: IsolationPlan,
    scale: float,
    bias: torch.Tensor | None,
    length: float,
    out: torch.Tensor,
) -> None:
    """Attend for all rows of a step.

    Args:
        query: ``[rows, heads, d]``.
        kv_cache: ``[blocks, heads, block_size, 2 * d]``, keys before values, the step's own already written.
        plan: of the step.
        scale: of the scores.
        bias: ``[distances]``, added to scores by distance; ``None``: nothing is.
        length: what the sum is divided by.
        out: ``[rows, heads, d]``, written for the plan's rows.

    """
    for history in plan.histories:
        keys, values = _gather(kv_cache, history.blocks)
        _history(query, keys, values, history, scale, bias, length, out)
    for candidates in plan.candidates:
        keys, values = (part[:, : candidates.history_len] for part in _gather(kv_cache, candidates.blocks))
        _candidates(query, keys, values, candidates, scale, bias, length, out)
        _own(query, kv_cache, candidates, scale, bias, length, out)


def _gather(kv_cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some blocks, ``[heads, tokens, d]`` each."""
    # From the cache as it is: index_select would copy all of a transposed one first.
    keys, values = kv_cache.index_select(0, blocks).transpose(0, 1).flatten(1, 2).chunk(2, dim=-1)
    return keys, values


def _history(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    history: HistoryRows,
    scale: float,
    bias: torch.Tensor | None,
    length: float,
    out: torch.Tensor,
) -> None:
    for first in range(history.first, history.last, TILE):
        last = min(first + TILE, history.last)
        at = history.computed + first - history.first
        end = at + last - first
        scores = _scores(query[first:last], keys[:, :end], scale)
        if bias is not None:
            scores += _causal_bias(bias, at, end)
        weights = F.silu(scores, inplace=True)
        weights[..., at:] = weights[..., at:].tril()
        out[first:last] = (weights @ values[:, :end]).transpose(0, 1) / length


def _candidates(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    candidates: CandidateRows,
    scale: float,
    bias: torch.Tensor | None,
    length: float,
    out: torch.Tensor,
) -> None:
    size, width = keys.shape[1], candidates.own_distance.shape[1]
    table = None if bias is None else _bias_before(bias, size, width)
    offsets = candidates.logical - size
    for first in range(0, len(candidates.rows), TILE):
        rows = candidates.rows[first : first + TILE]
        scores = _scores(query[rows], keys, scale)
        if table is not None:
            # Candidates of one token are all equally far from the history.
            scores += table if width == 1 else table[offsets[first : first + TILE]]
        out[rows] = (F.silu(scores, inplace=True) @ values).transpose(0, 1) / length


def _own(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    candidates: CandidateRows,
    scale: float,
    bias: torch.Tensor | None,
    length: float,
    out: torch.Tensor,
) -> None:
    """Add what a row sees of its own candidate."""
    own = kv_cache[candidates.own_blocks, :, candidates.own_offsets]
    keys, values = own.chunk(2, dim=-1)  # [rows, width, heads, d] each
    scores = torch.einsum("rhd,rwhd->rhw", query[candidates.rows], keys) * scale
    distance = candidates.own_distance.unsqueeze(1)
    if bias is not None:
        scores += bias[distance.clamp(min=0)]
    weights = F.silu(scores) * (distance >= 0)
    out[candidates.rows] += torch.einsum("rhw,rwhd->rhd", weights, values) / length


def _causal_bias(bias: torch.Tensor, at: int, end: int) -> torch.Tensor:
    """``bias[row - key]`` for rows ``at`` to ``end`` and keys up to ``end``; 0 where the key lies behind the row.

    Each row is the one before, shifted by one: slices of one vector, which is much cheaper than to look up each number.
    """
    behind = bias.new_zeros(end - at - 1)
    shifted = torch.cat((bias[:end].flip(0), behind)).unfold(0, end, 1)
    return shifted.flip(0)


def _bias_before(bias: torch.Tensor, history_len: int, width: int) -> torch.Tensor:
    """``bias[history_len + offset - key]`` for ``width`` offsets behind a history and all its keys."""
    return bias[1 : history_len + width].unfold(0, history_len, 1).flip(1)


def _scores(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """``[heads, rows, keys]``."""
    return (query * scale).transpose(0, 1) @ keys.transpose(1, 2)
