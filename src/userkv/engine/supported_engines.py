"""Which engines the user cache can serve. Anything else fails at start-up, with the reason."""

from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from userkv.cache.settings import ENABLE
from userkv.core.errors import UnsupportedEngineError
from userkv.core.pool_settings import CONNECTOR
from userkv.engine.pool.backends import check_backend
from userkv.engine.pool.transfer_config import check_transfer_config

CONNECTORS = (CONNECTOR, "MooncakeConnector", "NixlConnector")
"""KV connectors that cannot give one user's KV to another: ours, and those that hand over a request's own blocks
and keep nothing.

Those that store KV by block hashes or tokens would, and some fail on user requests, which have no hashes.
"""


def check_config(config: VllmConfig) -> None:
    """Refuse what the configuration already shows, before any process starts.

    Raises:
        UnsupportedEngineError: with one sentence that says why.
        InvalidSettingError: the pool's settings cannot be used.

    """
    model = config.model_config
    if model is None:
        return
    if model.is_attention_free:
        _refuse("the model has no attention and so no KV to keep")
    if model.is_hybrid:
        _refuse("the model is hybrid (it has Mamba or linear-attention layers)")
    if model.is_encoder_decoder:
        _refuse("the model is an encoder-decoder")
    if model.get_sliding_window() is not None:
        _refuse("the model uses sliding-window attention")
    if config.speculative_config is not None:
        _refuse("speculative decoding is on")
    if (
        config.parallel_config.decode_context_parallel_size > 1
        or config.parallel_config.prefill_context_parallel_size > 1
    ):
        _refuse("context parallelism is on")
    if not config.cache_config.enable_prefix_caching:
        _refuse("prefix caching is off (start vLLM with --enable-prefix-caching)")
    connector = config.kv_transfer_config.kv_connector if config.kv_transfer_config is not None else None
    if connector is not None and connector not in CONNECTORS:
        _refuse(f"the KV connector {connector} finds KV by its tokens, for all users")
    if connector == CONNECTOR:
        check_backend(check_transfer_config(config), config.parallel_config.world_size)


def check_kv_cache(
    kv_cache_config: KVCacheConfig, *, enable_caching: bool, use_eagle: bool, context_parallel: int
) -> None:
    """Refuse what only the model's KV layout shows.

    Raises:
        UnsupportedEngineError: with one sentence that says why.

    """
    groups = kv_cache_config.kv_cache_groups
    if not enable_caching:
        _refuse("prefix caching is off (start vLLM with --enable-prefix-caching)")
    if use_eagle:
        _refuse("speculative decoding is on")
    if context_parallel > 1:
        _refuse("context parallelism is on")
    if len(groups) != 1:
        _refuse(f"the model is hybrid (it has {len(groups)} kinds of KV cache)")
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        _refuse(f"its KV cache is of kind {type(spec).__name__}, not full attention")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        _refuse("the model uses sliding-window or chunked attention")
    if spec.non_causal:
        _refuse("the model attends non-causally, so that a prefix's KV depends on what follows")


def check_manager(manager: object) -> None:
    """Refuse a KV cache manager other than vLLM's for full attention."""
    if type(manager) is not FullAttentionManager:
        _refuse(f"the KV cache is managed by {type(manager).__name__}")


def _refuse(reason: str) -> None:
    raise UnsupportedEngineError(f"{ENABLE} cannot be used here: {reason}; unset {ENABLE} or change that")
