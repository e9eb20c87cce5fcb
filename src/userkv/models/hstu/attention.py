"""HSTU's attention as an attention backend of vLLM, with its own use of the paged KV cache."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from userkv.models.attention.metadata import Planned, facts_of, plan_of
from userkv.models.attention.silu import silu_attention

BACKEND = "USERKV_HSTU"


@dataclass(kw_only=True)
class HSTUMetadata(Planned):
    """A step; ``block_table`` is ``[requests, blocks]``."""

    block_table: torch.Tensor


class HSTUMetadataBuilder(AttentionMetadataBuilder[HSTUMetadata]):
    """Makes the metadata of each step."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HSTUMetadata:
        table = common_attn_metadata.block_table_tensor[: common_attn_metadata.num_reqs]
        return HSTUMetadata(block_table=table, **facts_of(common_attn_metadata, self.kv_cache_spec.block_size))


class HSTUBackend(AttentionBackend):
    """Pointwise attention over blocks of ``[heads, block_size, key and value]``."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type["HSTUImpl"]:
        return HSTUImpl

    @staticmethod
    def get_builder_cls() -> type[HSTUMetadataBuilder]:
        return HSTUMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class HSTUImpl(AttentionImpl[HSTUMetadata]):
    """One layer's attention.

    Args:
        num_heads: of queries, keys and values alike.
        head_size: of all three.
        scale: of the scores.
        num_kv_heads: the same as ``num_heads``.
        alibi_slopes: not supported, as all up to ``kv_sharing_target_layer_name``.
        sliding_window: see ``alibi_slopes``.
        kv_cache_dtype: must be that of the model.
        logits_soft_cap: see ``alibi_slopes``.
        attn_type: decoder.
        kv_sharing_target_layer_name: see ``alibi_slopes``.
        relative_bias: ``[distances]``, or ``None``.
        max_sequence_length: what the weighted sum is divided by.

    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        relative_bias: torch.Tensor | None,
        max_sequence_length: int,
    ) -> None:
        if kv_cache_dtype != "auto":
            raise ValueError(f"HSTU keeps KV in the model's dtype; leave out --kv-cache-dtype {kv_cache_dtype}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self._relative_bias = relative_bias
        self._max_sequence_length = float(max_sequence_length)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values, ``[rows, heads, d]`` each, to their places."""
        block_size = kv_cache.shape[2]
        rows = (slot_mapping >= 0).nonzero().squeeze(1)  # The others are padding.
        slots = slot_mapping[rows].long()
        kv_cache[slots // block_size, :, slots % block_size] = torch.cat((key, value), dim=-1)[rows]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HSTUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.zero_()  # vLLM measures memory, or warms up.
        plan = plan_of(attn_metadata)
        silu_attention(query, kv_cache, plan, self.scale, self._relative_bias, self._max_sequence_length, output)
        return output
