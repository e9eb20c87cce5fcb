"""Ranking models of a size that benchmarks can bear, with random weights."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from userkv.models.hstu.config import HSTUConfig
from userkv.models.hstu.reference import HSTUModel
from userkv.serving.demo_model import DEMO_RANKER, VOCAB_SIZE, ensure_model

QWEN3 = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
"""Qwen3-shaped, 8 KiB of KV per token in float32."""

RESERVED = 16
HSTU_ITEMS = 20_000


def hstu(directory: Path) -> tuple[Path, int, int]:
    """8 layers of 8 heads of 32, width 256: 16 KiB of KV per token in float32.

    Returns:
        Its directory, how many items it has, and tokens per item.

    """
    config = HSTUConfig(
        num_items=HSTU_ITEMS + RESERVED,
        item_embedding_dim=256,
        num_blocks=8,
        num_heads=8,
        max_sequence_length=4096,
        userkv_ranking={
            "candidate_offset": HSTU_ITEMS + RESERVED,
            "items": {"kind": "codec", "base": HSTU_ITEMS, "digits": 1, "reserved": RESERVED},
        },
        dtype="float32",
    )
    torch.manual_seed(0)
    directory.mkdir(parents=True)
    save_file(HSTUModel(config).state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    return directory, HSTU_ITEMS, 1


def qwen3(directory: Path) -> tuple[Path, int, int]:
    """As :func:`hstu`, for a Qwen3-shaped ranker with items of two tokens."""
    model = ensure_model({**DEMO_RANKER, **QWEN3}, name="userkv-bench-ranker")
    return model, ((VOCAB_SIZE - RESERVED) // 2) ** 2, 2


MODELS: dict[str, Callable[[Path], tuple[Path, int, int]]] = {"hstu": hstu, "qwen3": qwen3}
