"""Engines that the user cache cannot serve are refused at start-up with one sentence, from real configurations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from userkv.core.errors import UnsupportedEngineError
from userkv.engine.supported_engines import check_kv_cache, check_manager
from userkv.serving.demo_model import ensure_demo_model

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


def model_dir(tmp_path: Path, **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


OFFLOADING = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "sliding_window": 256,
    "torch_dtype": "float32",
}
MAMBA = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "vocab_size": 128,
    "torch_dtype": "float32",
}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 2,
    "mamba_d_head": 64,
    "intermediate_size": 64,
    "vocab_size": 128,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        (MISTRAL, {}, "sliding-window attention"),
        (MAMBA, {}, "no attention"),
        (FALCON_H1, {}, "hybrid"),
        (None, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding is on"),
        (None, {"enable_prefix_caching": False}, "prefix caching is off"),
        (None, {"kv_transfer_config": OFFLOADING}, "the KV connector OffloadingConnector finds KV by its tokens"),
    ],
    ids=["sliding window", "mamba", "hybrid", "speculative", "no prefix caching", "connector"],
)
def test_refused_before_any_process_starts(
    config: dict[str, Any] | None,
    options: dict[str, Any],
    why: str,
    tmp_path: Path,
    patched_vllm: pytest.MonkeyPatch,
) -> None:
    model = model_dir(tmp_path, **config) if config else str(ensure_demo_model())
    arguments = {"enable_prefix_caching": True, "max_model_len": 512, "skip_tokenizer_init": True, **options}
    with pytest.raises(UnsupportedEngineError, match=why) as error:
        EngineArgs(model=model, **arguments).create_engine_config()
    assert "\n" not in str(error.value)


def test_an_engine_that_can_be_served_starts(patched_vllm: pytest.MonkeyPatch) -> None:
    EngineArgs(model=str(ensure_demo_model()), enable_prefix_caching=True).create_engine_config()


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([FULL, FULL], "2 kinds of KV cache"),
        ([], "0 kinds of KV cache"),
        ([SlidingWindowSpec(**SHAPE, sliding_window=64)], "SlidingWindowSpec"),
        ([MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))], "MambaSpec"),
        ([MLAAttentionSpec(**SHAPE)], "MLAAttentionSpec"),
        ([FullAttentionSpec(**SHAPE, sliding_window=64)], "sliding-window"),
        ([FullAttentionSpec(**SHAPE, attention_chunk_size=64)], "chunked attention"),
        ([FullAttentionSpec(**SHAPE, non_causal=True)], "non-causally"),
    ],
)
def test_kv_layouts_that_are_refused(specs: list[Any], why: str) -> None:
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    with pytest.raises(UnsupportedEngineError, match=why):
        check_kv_cache(KVCacheConfig(8, [], groups), enable_caching=True, use_eagle=False, context_parallel=1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_caching": False}, "prefix caching is off"),
        ({"use_eagle": True}, "speculative decoding"),
        ({"context_parallel": 2}, "context parallelism"),
    ],
)
def test_engine_options_that_are_refused(options: dict[str, Any], why: str) -> None:
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], FULL)])
    with pytest.raises(UnsupportedEngineError, match=why):
        check_kv_cache(config, **{"enable_caching": True, "use_eagle": False, "context_parallel": 1, **options})


def test_other_managers_are_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="managed by object"):
        check_manager(object())


def test_without_the_switch_vllm_is_untouched() -> None:
    """In a process of its own: vLLM loads the plugin, and no name changes but for a check of ranking prompts."""
    script = """
import sys
import vllm.v1.core.kv_cache_manager, vllm.v1.core.sched.scheduler, vllm.v1.engine.core, vllm.v1.engine.async_llm
from vllm.plugins import load_general_plugins, load_plugins_by_group
assert "userkv" in load_plugins_by_group("vllm.general_plugins")
load_general_plugins()
assert "userkv.engine.plugin" in sys.modules
assert "userkv.engine.vllm_compat.patches" not in sys.modules
for module, name in [
    (vllm.v1.core.sched.scheduler, "KVCacheManager"),
    (vllm.v1.core.kv_cache_manager, "get_kv_cache_coordinator"),
    (vllm.v1.engine.core, "get_request_block_hasher"),
    (vllm.v1.engine.async_llm.AsyncLLM, "generate"),
]:
    assert getattr(module, name).__module__.startswith("vllm."), name
assert "admission" in vllm.v1.engine.input_processor.InputProcessor.process_inputs.__code__.co_filename
print("untouched")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env={"VLLM_LOGGING_LEVEL": "ERROR"}
    )
    assert run.stdout.strip().endswith("untouched"), run.stderr
