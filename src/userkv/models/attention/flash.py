"""Candidates' attention by a FlashAttention kernel over the paged cache: one call for the whole batch, then the merge.

The kernel is passed in, so that all around it is tested where there is no GPU.
"""

from typing import Protocol

import torch

from userkv.models.attention.isolation import CandidateRows, IsolationPlan, RequestRows
from userkv.models.attention.softmax import merge_own


class VarlenKernel(Protocol):
    """The part of ``flash_attn_varlen_func`` that is used, with the log-sum-exp returned."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        seqused_k: torch.Tensor,
        max_seqlen_k: int,
        block_table: torch.Tensor,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention without a causal mask.

        Args:
            q: ``[rows, heads, d]``, the sequences' queries one after the other.
            k: ``[blocks, block_size, kv_heads, d]``.
            v: same.
            cu_seqlens_q: int32 ``[sequences + 1]``.
            max_seqlen_q: most rows of a sequence.
            seqused_k: int32 ``[sequences]``, keys of each, 1 or more.
            max_seqlen_k: most of them.
            block_table: int32 ``[sequences, blocks]``.
            softmax_scale: of the scores.

        Returns:
            ``[rows, heads, d]``, and the log-sum-exp in float32, ``[heads, rows]``.

        """


def attend_candidates(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: IsolationPlan,
    scale: float,
    kernel: VarlenKernel,
    output: torch.Tensor,
) -> None:
    """Attend for all rows of candidates in a step.

    Args:
        query: ``[rows, heads, d]``, of the whole step.
        kv_cache: ``[blocks, kv_heads, block_size, 2 * d]``, keys before values.
        plan: of the step.
        scale: of the scores.
        kernel: see :class:`VarlenKernel`.
        output: ``[rows, heads, d]``, written for candidates' rows.

    """
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    ranked = [(request, request.candidates) for request in plan.requests if request.candidates is not None]
    behind_history = [(request, rows) for request, rows in ranked if request.history_len]
    if behind_history:
        history, lse = _histories(query, keys, values, behind_history, scale, kernel)
    at = 0
    for request, rows in ranked:
        size = rows.last - rows.first
        of_history = of_lse = None
        if request.history_len:
            of_history, of_lse = history[at : at + size], lse[:, at : at + size].transpose(0, 1)
            at += size
        own = kv_cache[rows.own_blocks, :, rows.own_offsets]
        own_keys, own_values = own.chunk(2, dim=-1)
        merged = merge_own(query[rows.first : rows.last], own_keys, own_values, rows, scale, of_history, of_lse)
        output[rows.first : rows.last] = merged.to(output.dtype)


def _histories(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ranked: list[tuple[RequestRows, CandidateRows]],
    scale: float,
    kernel: VarlenKernel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the histories alone, the requests' rows one after the other."""
    device = query.device
    sizes = [rows.last - rows.first for _, rows in ranked]
    lengths = [request.history_len for request, _ in ranked]
    ends = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    widest = max(len(request.blocks) for request, _ in ranked)
    table = torch.zeros(len(ranked), widest, dtype=torch.int32, device=device)
    for number, (request, _) in enumerate(ranked):
        table[number, : len(request.blocks)] = request.blocks
    return kernel(
        torch.cat([query[rows.first : rows.last] for _, rows in ranked]),
        keys,
        values,
        cu_seqlens_q=ends.to(device),
        max_seqlen_q=max(sizes),
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_seqlen_k=max(lengths),
        block_table=table,
        softmax_scale=scale,
    )
