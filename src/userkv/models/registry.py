"""Makes the ranking models known to transformers and vLLM. Cheap: the models are imported when they are used."""

from pathlib import Path

from transformers import AutoConfig
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends.registry import register_backend

from userkv.models.hstu.config import ARCHITECTURE, MODEL_TYPE, HSTUConfig
from userkv.ranking import prompt

MODELS = {
    ARCHITECTURE: "userkv.models.hstu.ranker:HSTURanker",
    "Qwen3Ranker": "userkv.models.qwen3:Qwen3Ranker",
}


def code_files() -> list[Path]:
    """The files whose code decides what these models' KV is: theirs, and what tells them positions."""
    return [*Path(__file__).parent.rglob("*.py"), Path(prompt.__file__)]


def register() -> None:
    """Register everything; may be called again."""
    AutoConfig.register(MODEL_TYPE, HSTUConfig, exist_ok=True)
    register_backend("USERKV_HSTU", "userkv.models.hstu.attention.HSTUBackend")
    for name, place in MODELS.items():
        ModelRegistry.register_model(name, place)
