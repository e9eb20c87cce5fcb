"""Gives attention layers that vLLM has made a backend which isolates candidates."""

from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionBackend


def isolate_layer(
    attention: Attention, stock: type, isolated: type[AttentionBackend], no_window: int | tuple[int, int]
) -> None:
    """Replace a layer's backend.

    Args:
        attention: the layer.
        stock: vLLM's implementation that it must have now.
        isolated: a backend whose implementation inherits from that one and differs in ``forward`` alone.
        no_window: how vLLM's implementation writes that there is no sliding window.

    Raises:
        ValueError: the layer does something that candidates' rows would not get.

    """
    impl: Any = attention.impl
    found = impl.__class__
    if found is not stock:
        raise ValueError(f"candidates can be isolated in {stock.__name__} only, not in {found.__name__}")
    windowed = impl.sliding_window != no_window
    if windowed or impl.alibi_slopes is not None or impl.logits_soft_cap or impl.sinks is not None:
        raise ValueError("candidates cannot be isolated with ALiBi, a sliding window, a soft cap or sinks")
    if is_quantized_kv_cache(impl.kv_cache_dtype):
        raise ValueError("candidates cannot be isolated over an FP8 KV cache; leave out --kv-cache-dtype")
    impl.__class__ = isolated.get_impl_cls()
    attention.attn_backend = isolated
