"""Candidate isolation for decoders on a CPU: vLLM's own kernel for histories, ours for candidates.

vLLM's CPU cache keeps a block's keys transposed, ``[kv_heads, d, block_size]``, and its values as ``[kv_heads,
block_size, d]`` (measured on 0.32.0 for the kernels ``vec`` and ``vec16``; the one for AMX packs keys differently and
is not used here).
"""

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from userkv.models.attention.isolate import isolate_layer
from userkv.models.attention.isolation import CandidateRows
from userkv.models.attention.metadata import Planned, facts_of, fields_of, plan_of
from userkv.models.attention.softmax import merge_own


@dataclass
class IsolatedCPUMetadata(Planned, CPUAttentionMetadata):
    """vLLM's metadata with a plan."""


class IsolatedCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Adds to vLLM's metadata what a plan is made from."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.isa: str
        if self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> IsolatedCPUMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return IsolatedCPUMetadata(**fields_of(base), **facts_of(common_attn_metadata, self.block_size))


class IsolatedCPUImpl(CPUAttentionBackendImpl):
    """vLLM's attention for rows of histories; rows of candidates see the history and their own candidate."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: IsolatedCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        plan = plan_of(attn_metadata)
        if plan.histories:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        for candidates in plan.candidates:
            output[candidates.rows] = attend(query[candidates.rows], kv_cache, candidates, self.scale)
        return output


class IsolatedCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with candidates isolated. It has vLLM's name, as vLLM asks for a known one."""

    @staticmethod
    def get_impl_cls() -> type[IsolatedCPUImpl]:
        return IsolatedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[IsolatedCPUMetadataBuilder]:
        return IsolatedCPUMetadataBuilder


def isolate(attention: Attention) -> None:
    """Give a layer that vLLM has made this backend; raises as :func:`isolate_layer`."""
    isolate_layer(attention, CPUAttentionBackendImpl, IsolatedCPUBackend, -1)


def attend(query: torch.Tensor, kv_cache: torch.Tensor, candidates: CandidateRows, scale: float) -> torch.Tensor:
    """Attention of candidates behind one history.

    Args:
        query: ``[rows, heads, d]``.
        kv_cache: ``[blocks, kv_heads, block_size, 2 * d]``, as vLLM allocates it.
        candidates: which rows these are, and where their history is.
        scale: of the scores.

    Returns:
        ``[rows, heads, d]``.

    """
    keys, values = _halves(kv_cache)
    own_keys = keys[candidates.own_blocks, :, :, candidates.own_offsets]
    own_values = values[candidates.own_blocks, :, candidates.own_offsets]
    history = lse = None
    if candidates.history_len:
        size = candidates.history_len
        seen_keys, seen_values = _halves(kv_cache.index_select(0, candidates.blocks))
        # Transposed back: the kernel wants the last dimension to be dense, and does not check it.
        seen_keys = seen_keys.permute(1, 0, 3, 2).flatten(1, 2)[:, :size].contiguous()
        seen_values = seen_values.transpose(0, 1).flatten(1, 2)[:, :size]
        # The kernel behind scaled_dot_product_attention, which tells the log-sum-exp, too. Heads may share keys.
        history, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.transpose(0, 1).unsqueeze(0), seen_keys.unsqueeze(0), seen_values.unsqueeze(0), scale=scale
        )
        history, lse = history[0].transpose(0, 1), lse[0].transpose(0, 1)
    return merge_own(query, own_keys, own_values, candidates, scale, history, lse).to(query.dtype)


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[blocks, kv_heads, d, block_size]`` and values ``[blocks, kv_heads, block_size, d]`` of some blocks."""
    num_blocks, kv_heads, block_size, double = kv_cache.shape
    halves = kv_cache.view(num_blocks, kv_heads, 2, block_size * double // 2)
    keys = halves[:, :, 0].view(num_blocks, kv_heads, -1, block_size)
    return keys, halves[:, :, 1].view(num_blocks, kv_heads, block_size, -1)
