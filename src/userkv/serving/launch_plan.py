"""All that decides how ``userkv serve`` starts vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LaunchPlan:
    """All that decides how the server starts.

    Attributes:
        model: directory of the model, or its name on a hub.
        served_name: what clients write into "model".
        host: address to listen on.
        port: TCP port to listen on.
        users: whether the user-granular cache is on.
        vllm_arguments: command line of vLLM's API server.
        environment: variables to set before vLLM is imported; ``None`` removes one.
        pool: options of the connector that keeps users' KV outside the engine; ``None`` without one of ours.
        ranks: whether the model is one for ``/v1/rank``.

    """

    model: str
    served_name: str
    host: str
    port: int
    users: bool
    vllm_arguments: list[str]
    environment: dict[str, str | None] = field(default_factory=dict)
    pool: Mapping[str, Any] | None = None
    ranks: bool = False
