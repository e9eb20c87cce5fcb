"""The entry point of group ``vllm.endpoint_plugins``: vLLM loads it if ``VLLM_PLUGINS`` names it."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from userkv.cache.settings import CacheSettings
from userkv.ranking.config_keys import CONFIG_KEY
from userkv.ranking.spec import RankingSpec
from userkv.serving.rank.routes import STATE, router
from userkv.serving.rank.scoring import LabelScorer, OnePassScorer
from userkv.serving.rank.service import RankService

UNNAMED_WEIGHTS = "default"
"""What vLLM calls the weights that an engine starts with."""


class RankPlugin:
    """Adds ``/v1/rank`` to vLLM's server; see ``EndpointPlugin`` of vLLM for what its parts are."""

    name = "userkv"
    required_tasks = None
    """On any server: where the model cannot rank, the endpoint says so."""

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Get ready for the served model.

        Raises:
            InvalidSettingError: it is a ranking model, but its directory has faults.

        """
        setattr(state, STATE, await service_for(engine_client, args))


async def service_for(engine: Any, args: Namespace) -> RankService | str:
    """What answers ``/v1/rank``; one sentence if nothing can.

    Raises:
        InvalidSettingError: the model is a ranking model, but its directory has faults.

    """
    if engine is None:
        return "this server has no engine and cannot rank; ask one that serves a ranking model"
    model = engine.vllm_config.model_config
    names = tuple(args.served_model_name or [args.model])
    config = model.hf_config.to_dict()
    if config.get(CONFIG_KEY) is None:
        return (
            f"{names[0]!r} is no ranking model (its config.json has no {CONFIG_KEY!r}); serve one with userkv serve "
            "--model, or use /v1/completions"
        )
    spec = RankingSpec.from_config(config, _directory(model.model))
    task, scorer = ("generate", LabelScorer) if spec.score == "label" else ("classify", OnePassScorer)
    if task not in await engine.get_supported_tasks():
        runner = "generate" if task == "generate" else "pooling"
        return f"{names[0]!r} ranks only if vLLM was started with --runner {runner}; restart it so to have scores"

    async def weights_version() -> str:
        version: str = await engine.get_weight_version()
        return version if version != UNNAMED_WEIGHTS else _named_weights(engine.vllm_config)

    return RankService(
        spec=spec,
        scorer=scorer(engine, spec),
        names=names,
        max_model_len=model.max_model_len,
        users=CacheSettings.is_enabled(),
        weights_version=weights_version,
    )


def _directory(model: str) -> Path | None:
    path = Path(model)
    return path if path.is_dir() else None


def _named_weights(config: Any) -> str:
    """How the operator calls the weights that the engine started with."""
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    return str((extra or {}).get("weights_version") or UNNAMED_WEIGHTS)
