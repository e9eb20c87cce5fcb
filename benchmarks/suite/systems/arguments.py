"""Options of ``userkv replay`` and environment variables that several systems share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STOCK = ("--no-users", "--engine-arg", "enable_prefix_caching=true")
"""vLLM with its own prefix cache, and nobody tells it who the users are."""

STOCK_ENVIRONMENT: Mapping[str, str] = {"VLLM_PLUGINS": ""}
"""Our plugin is not even loaded."""

LOOPBACK = "127.0.0.1"


def connector(name: str, **extra: Any) -> tuple[str, str]:
    """The option that makes vLLM use one of its own KV connectors, with these entries in its extra config."""
    config = {
        "kv_connector": name,
        "kv_role": "kv_both",
        # A load that fails is computed again, as in UserKV; vLLM by itself would fail the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return "--engine-arg", f"kv_transfer_config={json.dumps(config)}"


def total(counters: Mapping[str, float] | None, name: str) -> int | None:
    """A metric added up over its labels, of ``engine_counters`` or a page of ``page_counters``.

    None if there are no figures; 0 if there are, but this one was never counted.
    """
    if counters is None:
        return None
    return int(sum(value for key, value in counters.items() if key == name or key.startswith(f"{name}{{")))
