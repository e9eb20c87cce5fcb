"""A small bundled model: its definition is here, its weights are made on this machine from a fixed seed.

Nothing is downloaded. The model is an untrained Qwen3 whose vocabulary has the shape that generative recommendation
uses: a few reserved tokens and two ranges of "digit" tokens that together name an item. Its weights are drawn so that
every history token moves the next-token distribution visibly, so a wrong KV block shows up in the output.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEMO_MODEL_NAME = "userkv-demo"
DEMO_RANKER_NAME = "userkv-demo-ranker"
VOCAB_SIZE = 4352
"""Tokens in the vocabulary: the reserved ones and two digit ranges of equal size."""

NUM_RESERVED_TOKENS = 16
"""Token ids below this are control tokens; see :func:`vocabulary`."""

PAD_TOKEN_ID, EOS_TOKEN_ID, CANDIDATE_TOKEN_ID = 0, 1, 2

DEMO_ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 16384,
    # Compiling takes a C++ compiler and longer than it saves on a model of this size.
    "enforce_eager": True,
}
"""vLLM's engine arguments for the demo model, unless told otherwise."""

DEFAULT_SEED = 20240601

_FORMAT = 1  # Part of the fingerprint: raise it when the way in which a model is written changes.

_DEFINITION: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": PAD_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": None,
}


DEMO_RANKER: dict[str, Any] = {
    "architectures": ["Qwen3Ranker"],
    "mrope_section": [1, 1, 1],  # Three numbers per token for the model; see RankingFormat.positions.
    "userkv_ranking": {
        "candidate_marker": CANDIDATE_TOKEN_ID,
        "score": "logprob",
        "tasks": ["logprob"],
        "max_item_tokens": 2,
        "items": {
            "kind": "codec",
            "base": (VOCAB_SIZE - NUM_RESERVED_TOKENS) // 2,
            "digits": 2,
            "reserved": NUM_RESERVED_TOKENS,
        },
    },
}
"""What makes a ranking model of the demo model."""


def userkv_home() -> Path:
    """Directory of everything that UserKV keeps on disk: ``$USERKV_HOME``, else ``~/.cache/userkv``."""
    return Path(os.environ.get("USERKV_HOME") or Path.home() / ".cache" / "userkv").expanduser()


def vocabulary(vocab_size: int = VOCAB_SIZE) -> list[str]:
    """Names of the tokens, in id order: reserved tokens, then the digit ranges ``a0..`` and ``b0..``.

    ``vocab_size - NUM_RESERVED_TOKENS`` must be even and positive, or ``ValueError`` is raised.
    """
    digits, odd = divmod(vocab_size - NUM_RESERVED_TOKENS, 2)
    if odd or digits < 1:
        raise ValueError(f"vocab_size must be {NUM_RESERVED_TOKENS} plus a positive even number, not {vocab_size}")
    reserved = ["<pad>", "<eos>", "<cand>", *(f"<r{i}>" for i in range(3, NUM_RESERVED_TOKENS))]
    return [*reserved, *(f"a{i}" for i in range(digits)), *(f"b{i}" for i in range(digits))]


def ensure_demo_model(root: Path | None = None) -> Path:
    """The directory of the demo model, written first if it is not there yet (about 2 s, 22 MB)."""
    return ensure_model(root=root)


def ensure_demo_ranker(root: Path | None = None) -> Path:
    """The same weights as a ranking model: a candidate's score is the log-probability of its two tokens."""
    return ensure_model(DEMO_RANKER, root=root, name=DEMO_RANKER_NAME)


def ensure_model(
    config_overrides: Mapping[str, Any] | None = None,
    seed: int = DEFAULT_SEED,
    root: Path | None = None,
    name: str = DEMO_MODEL_NAME,
) -> Path:
    """The directory of a variant of the demo model, written first if it is not there yet.

    ``config_overrides`` are ``Qwen3Config`` arguments that replace those of the demo model. ``root`` is the directory
    that holds models (default: ``userkv_home()/models``). The directory's name carries a fingerprint of all that
    decides its content, so a changed definition never meets old weights. Any number of processes may call this at
    once: a directory appears complete or not at all.
    """
    definition = {**_DEFINITION, **(config_overrides or {})}
    target = (root or userkv_home() / "models") / f"{name}-{_fingerprint(definition, seed)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_model(definition, seed, partial)
        # mkdtemp and safetensors create private files, but another account may serve the model.
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # Otherwise another process was faster, with the same content.
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _fingerprint(definition: Mapping[str, Any], seed: int) -> str:
    text = json.dumps({"format": _FORMAT, "seed": seed, "definition": definition}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _write_model(definition: Mapping[str, Any], seed: int, directory: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{"architectures": ["Qwen3ForCausalLM"], **definition}, dtype="float32")
    with torch.device("meta"):  # Only names and shapes are wanted of it.
        parameters = dict(Qwen3ForCausalLM(config).named_parameters())
    # numpy's generator gives the same numbers with every version of torch and on every CPU, so engines on different
    # machines that serve the demo model have the same weights and may share KV.
    weights = {}
    for index, (name, parameter) in enumerate(sorted(parameters.items())):
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(parameter.shape)
        else:
            draw = np.random.default_rng([seed, index]).standard_normal(tuple(parameter.shape), dtype=np.float32)
            weights[name] = torch.from_numpy(draw * np.float32(config.initializer_range))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    _write_tokenizer(config.vocab_size, directory)


def _write_tokenizer(vocab_size: int, directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    names = vocabulary(vocab_size)
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[3]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=names[PAD_TOKEN_ID],
        eos_token=names[EOS_TOKEN_ID],
        unk_token=names[3],
    ).save_pretrained(directory)
