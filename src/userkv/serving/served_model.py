"""Which model is served, and what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from userkv.core.errors import UserKVError
from userkv.ranking.config_keys import CONFIG_KEY, ITEMS_FILE
from userkv.serving.demo_model import DEMO_MODEL_NAME, DEMO_RANKER_NAME, ensure_demo_model, ensure_demo_ranker


def resolve_model(model: str) -> str:
    """The directory of a local model or of a bundled one, or a hub's ``owner/name`` as it is."""
    if model == DEMO_RANKER_NAME:
        return str(ensure_demo_ranker())
    if model == DEMO_MODEL_NAME:
        return str(ensure_demo_model())
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UserKVError(f"the model directory {model} has no config.json; name the directory that holds it")
        return str(directory)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserKVError(f"there is no model directory {model}; give --model an existing one, or none for the demo")
    return model


def is_ranking_model(directory: Path) -> bool:
    """Whether a local model says how it ranks (see ``ranking/spec.py``)."""
    return _section(directory) is not None


def ranking_arguments(directory: Path) -> list[str]:
    """What vLLM has to be told about a local ranking model: it pools, and may have no tokenizer."""
    section = _section(directory)
    if section is None or section.get("score") == "label":
        return []
    tokenizer = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    # vLLM would make half precision of it, and of the scores.
    config = _config(directory)
    dtype = ("--dtype", "float32") if config.get("dtype", config.get("torch_dtype")) == "float32" else ()
    return ["--runner", "pooling", *dtype, *(() if tokenizer else ("--skip-tokenizer-init",))]


def example_items(directory: Path) -> list[int]:
    """Twelve items that a ranking model knows, or as many as it has."""
    try:
        items: list[int] = json.loads((directory / ITEMS_FILE).read_text())
    except OSError:
        return [1010, 2024, 35, 4711, 977, 58, 12001, 808, 19, 3663, 2500, 63]
    return items[:12]


def _section(directory: Path) -> dict[str, Any] | None:
    section = _config(directory).get(CONFIG_KEY)
    return section if isinstance(section, dict) else None


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}  # A hub's name; or vLLM will say what is wrong with it.
    return config if isinstance(config, dict) else {}
