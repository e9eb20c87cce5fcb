"""HSTU's attention over a paged KV cache: every score counts by itself, so a key that is not seen counts zero.

``out = sum over seen keys of silu(q k / sqrt(d) + bias(distance)) / n * v``, with one ``n`` for all. Pure PyTorch: on a
CPU its time is that of the matrix products; on CUDA it would run, too, but a fused kernel would be faster.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from userkv.models.attention.isolation import CandidateRows, IsolationPlan, RequestRows

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
    for request in plan.requests:
        # From the cache as it is: index_select would copy all of a transposed one first.
        keys, values = kv_cache.index_select(0, request.blocks).transpose(0, 1).flatten(1, 2).chunk(2, dim=-1)
        _history(query, keys, values, request, scale, bias, length, out)
        if request.candidates is not None:
            size = request.history_len
            _candidates(query, keys[:, :size], values[:, :size], request.candidates, scale, bias, length, out)
            _own(query, kv_cache, request.candidates, scale, bias, length, out)


def _history(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    request: RequestRows,
    scale: float,
    bias: torch.Tensor | None,
    length: float,
    out: torch.Tensor,
) -> None:
    for first in range(request.first, request.history_end, TILE):
        last = min(first + TILE, request.history_end)
        at = request.computed + first - request.first
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
    rows: CandidateRows,
    scale: float,
    bias: torch.Tensor | None,
    length: float,
    out: torch.Tensor,
) -> None:
    table = None if bias is None else _bias_before(bias, keys.shape[1], rows.own_distance.shape[1])
    offsets = rows.logical - keys.shape[1]
    for first in range(rows.first, rows.last, TILE):
        last = min(first + TILE, rows.last)
        scores = _scores(query[first:last], keys, scale)
        if table is not None:
            # Candidates of one token are all equally far from the history.
            scores += table if len(table) == 1 else table[offsets[first - rows.first : last - rows.first]]
        out[first:last] = (F.silu(scores, inplace=True) @ values).transpose(0, 1) / length


def _own(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    rows: CandidateRows,
    scale: float,
    bias: torch.Tensor | None,
    length: float,
    out: torch.Tensor,
) -> None:
    """Add what a row sees of its own candidate."""
    keys, values = kv_cache[rows.own_blocks, :, rows.own_offsets].chunk(2, dim=-1)  # [rows, width, heads, d] each
    scores = torch.einsum("rhd,rwhd->rhw", query[rows.first : rows.last], keys) * scale
    distance = rows.own_distance.unsqueeze(1)
    if bias is not None:
        scores += bias[distance.clamp(min=0)]
    weights = F.silu(scores) * (distance >= 0)
    out[rows.first : rows.last] += torch.einsum("rhw,rwhd->rhd", weights, values) / length


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
