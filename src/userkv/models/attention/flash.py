"""Candidates' attention by a FlashAttention kernel over the paged cache: one call for the whole batch, then the merge.

The kernel is passed in, so that all around it is tested where there is no GPU.
"""

from typing import Protocol

import torch

from userkv.models.attention.isolation import CandidateRows, IsolationPlan
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
    behind_history = [candidates for candidates in plan.candidates if candidates.history_len]
    if behind_history:
        history, lse = _histories(query, keys, values, behind_history, scale, kernel)
    at = 0
    for candidates in plan.candidates:
        of_history = of_lse = None
        if candidates.history_len:
            end = at + len(candidates.rows)
            of_history, of_lse = history[at:end], lse[:, at:end].transpose(0, 1)
            at = end
        own_keys, own_values = kv_cache[candidates.own_blocks, :, candidates.own_offsets].chunk(2, dim=-1)
        merged = merge_own(query[candidates.rows], own_keys, own_values, candidates, scale, of_history, of_lse)
        output[candidates.rows] = merged.to(output.dtype)


def _histories(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    behind: list[CandidateRows],
    scale: float,
    kernel: VarlenKernel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the histories alone, the candidates' rows one after the other."""
    device = query.device
    sizes = [len(candidates.rows) for candidates in behind]
    lengths = [candidates.history_len for candidates in behind]
    ends = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    widest = max(len(candidates.blocks) for candidates in behind)
    table = torch.zeros(len(behind), widest, dtype=torch.int32, device=device)
    for number, candidates in enumerate(behind):
        table[number, : len(candidates.blocks)] = candidates.blocks
    return kernel(
        query[torch.cat([candidates.rows for candidates in behind])],
        keys,
        values,
        cu_seqlens_q=ends.to(device),
        max_seqlen_q=max(sizes),
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_seqlen_k=max(lengths),
        block_table=table,
        softmax_scale=scale,
    )
