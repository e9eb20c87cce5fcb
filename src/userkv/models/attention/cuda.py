"""Candidate isolation for decoders on CUDA, around vLLM's FlashAttention backend. **Not run**: no GPU was at hand.

What is around the kernel (``flash.py``) is tested on a CPU with a stand-in for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from userkv.models.attention.flash import attend_candidates
from userkv.models.attention.isolate import isolate_layer
from userkv.models.attention.metadata import Planned, facts_of, fields_of, plan_of


@dataclass
class IsolatedFlashMetadata(Planned, FlashAttentionMetadata):
    """vLLM's metadata with a plan."""


class IsolatedFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Adds to vLLM's metadata what a plan is made from."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> IsolatedFlashMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return IsolatedFlashMetadata(**fields_of(base), **facts_of(common_attn_metadata, self.block_size))


class IsolatedFlashImpl(FlashAttentionImpl):
    """vLLM's attention for rows of histories; rows of candidates see the history and their own candidate."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: IsolatedFlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.zero_()
        plan = plan_of(attn_metadata)
        if plan.histories:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        attend_candidates(query, kv_cache, plan, self.scale, self._kernel, output)
        return output

    def _kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **where: Any) -> Any:
        return flash_attn_varlen_func(
            q, k, v, causal=False, return_softmax_lse=True, fa_version=self.vllm_flash_attn_version, **where
        )


class IsolatedFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention with candidates isolated. It has vLLM's name, as vLLM asks for a known one."""

    @staticmethod
    def get_impl_cls() -> type[IsolatedFlashImpl]:
        return IsolatedFlashImpl

    @staticmethod
    def get_builder_cls() -> type[IsolatedFlashMetadataBuilder]:
        return IsolatedFlashMetadataBuilder


def isolate(attention: Attention) -> None:
    """Give a layer that vLLM has made this backend; raises as :func:`isolate_layer`."""
    isolate_layer(attention, FlashAttentionImpl, IsolatedFlashBackend, (-1, -1))
