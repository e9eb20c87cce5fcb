"""From the options of ``userkv serve`` to all that decides how it starts vLLM."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from userkv.cache import settings
from userkv.core import options
from userkv.core.errors import InvalidOptionError, UserKVError
from userkv.core.sizes import GIB
from userkv.ranking.config_keys import CONFIG_KEY
from userkv.serving import pool_options
from userkv.serving.demo_model import DEMO_ENGINE_ARGUMENTS, DEMO_MODEL_NAME, DEMO_RANKER_NAME
from userkv.serving.preconditions import available_port, plugins
from userkv.serving.served_model import is_ranking_model, ranking_arguments, resolve_model

DEFAULT_KV_CACHE_GIB = 1.0
"""KV cache on a CPU unless something says otherwise; vLLM itself would take most of the machine's memory."""

SHUTDOWN_SECONDS = 30
"""How long running requests may go on after a signal; with vLLM's own 0 it kills the engine instead of ending it.

When it is over vLLM kills the engine and its workers, so what the requests take is not left for the workers to end:
it is longer than ``WORKER_SHUTDOWN_SECONDS``.
"""

WORKER_SHUTDOWN_SECONDS = 20
"""How long a worker may take to end before vLLM kills it.

It waits one after the other for three things. Transfers that run: ``JOIN_SECONDS`` of ``connector_worker.py``, 5.
Answers that it owes the scheduler: some calls to the pool, a second each at most. Its pool to be closed:
``CLOSE_SECONDS`` of ``store/local/backend.py`` and ``store/mooncake/connection.py``, 10. ``GRACE_SECONDS`` of
``child_processes.py`` is longer than this. A worker that is killed loses only what is not in the pool's files yet.
"""

KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


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


def plan_launch(args: argparse.Namespace, env: Mapping[str, str], *, on_cpu: bool) -> LaunchPlan:
    """Check the options and turn them into vLLM's options and environment; writes the demo model if it is needed.

    Raises:
        UserKVError: an option or variable cannot be used, the model does not exist, or the port is taken.

    """
    passthrough: Sequence[str] = args.passthrough
    if passthrough and not passthrough[0].startswith("-"):
        raise UserKVError(f"unexpected argument {passthrough[0]!r}; name the model with --model")
    _check_kv_cache_size(args.kv_cache_gib, on_cpu)
    environment = _environment(args, env)
    pool = pool_options.pool_settings(args, env, _option_instead_of_a_pool(args))
    port = available_port(args.host, args.port)
    model = resolve_model(args.model)
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = env.get("HF_HUB_OFFLINE", "1")
    served_name = args.served_model_name or (args.model if _is_demo(args) else model)
    address = ("--model", model, "--served-model-name", served_name, "--host", args.host, "--port", str(port))
    return LaunchPlan(
        model=model,
        served_name=served_name,
        host=args.host,
        port=port,
        users=not args.no_users,
        pool=pool,
        ranks=is_ranking_model(Path(model)) or any(CONFIG_KEY in word for word in passthrough),
        vllm_arguments=[
            *address,
            "--enable-prompt-tokens-details",
            "--enable-prefix-caching",
            *("--shutdown-timeout", str(SHUTDOWN_SECONDS)),
            *_model_arguments(args, model),
            *pool_options.transfer_arguments(pool),
            *_kv_cache_arguments(args.kv_cache_gib, env, on_cpu),
            *(() if args.verbose else ("--uvicorn-log-level", "warning")),
            *passthrough,  # Last, so that they win.
        ],
        environment=environment,
    )


def _check_kv_cache_size(gib: float | None, on_cpu: bool) -> None:
    if gib is not None and not gib > 0:
        raise InvalidOptionError("--kv-cache-gib", f"must be more than 0, not {gib:g}")
    if on_cpu and gib is not None and gib * GIB > psutil.virtual_memory().total:
        raise InvalidOptionError("--kv-cache-gib", f"{gib:g} is more than this machine's memory; set less")


def _is_demo(args: argparse.Namespace) -> bool:
    return args.model in (DEMO_MODEL_NAME, DEMO_RANKER_NAME)


def _option_names(words: Sequence[str]) -> set[str]:
    """vLLM takes underscores, and a part of an option ("--kv-transfer-config.kv_role"), too."""
    return {re.split(r"[=.]", word)[0].replace("_", "-") for word in words}


def _option_instead_of_a_pool(args: argparse.Namespace) -> str:
    """The option that leaves no place for a pool; "" if there is none."""
    if not _option_names(args.passthrough).isdisjoint(pool_options.TRANSFER_OPTIONS):
        return pool_options.TRANSFER_OPTIONS[0]
    return "--no-users" if args.no_users else ""


def _model_arguments(args: argparse.Namespace, model: str) -> list[str]:
    """What a ranking model needs, and what a demo model should have unless the options say otherwise."""
    ranking = ranking_arguments(Path(model))
    given = {*_option_names(args.passthrough), *ranking}
    return [*(_as_options(DEMO_ENGINE_ARGUMENTS, without=given) if _is_demo(args) else ()), *ranking]


def _as_options(arguments: Mapping[str, object], without: Set[str]) -> list[str]:
    """Arguments as options, but those that are given otherwise: vLLM warns of options that it gets twice."""
    words = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if option not in without:
            words += [option] if value is True else [option, str(value)]
    return words


def _environment(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, str | None]:
    """Variables of the server's process; ``None`` removes one."""
    environment: dict[str, str | None] = {settings.ENABLE: "0" if args.no_users else "1"}
    for option, variable, value in (
        ("--max-users", settings.MAX_USERS, args.max_users),
        ("--min-free-blocks", settings.MIN_FREE_BLOCKS, args.min_free_blocks),
    ):
        if value is not None:
            environment[variable] = str(options.whole_number(option, value, 0))
    # Only to check them before anything is loaded.
    settings.CacheSettings.from_env({**env, **{name: value or "" for name, value in environment.items()}})
    environment["VLLM_HOST_IP"] = env.get("VLLM_HOST_IP", "127.0.0.1")
    # A worker writes down what its pool holds in memory only, before it ends.
    name = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
    environment[name] = env.get(name, str(WORKER_SHUTDOWN_SECONDS))
    environment["VLLM_PLUGINS"] = plugins(env)
    environment["VLLM_NO_USAGE_STATS"] = env.get("VLLM_NO_USAGE_STATS", "1")
    environment["VLLM_LOGGING_LEVEL"] = env.get("VLLM_LOGGING_LEVEL", "INFO" if args.verbose else "WARNING")
    if args.kv_cache_gib is not None:
        environment[KV_SPACE_VARIABLE] = None  # vLLM lets the variable win over the option.
    return environment


def _kv_cache_arguments(gib: float | None, env: Mapping[str, str], on_cpu: bool) -> tuple[str, ...]:
    if gib is None:
        if not on_cpu or env.get(KV_SPACE_VARIABLE):
            return ()
        gib = DEFAULT_KV_CACHE_GIB
    return "--kv-cache-memory-bytes", str(int(gib * GIB))
