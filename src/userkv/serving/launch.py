"""``userkv serve``: vLLM's OpenAI API server with the user-granular cache switched on, in this process."""

from __future__ import annotations

import argparse
import errno
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path

import psutil

from userkv.cache import settings
from userkv.core.errors import InvalidSettingError, UserKVError
from userkv.core.sizes import GIB
from userkv.ranking.config_keys import CONFIG_KEY
from userkv.serving import pool_options
from userkv.serving.demo_model import DEMO_ENGINE_ARGUMENTS, DEMO_MODEL_NAME, DEMO_RANKER_NAME
from userkv.serving.launch_plan import LaunchPlan
from userkv.serving.served_model import is_ranking_model, ranking_arguments, resolve_model
from userkv.serving.signals import turn_interrupts_into_sigterm

DEFAULT_KV_CACHE_GIB = 1.0
"""KV cache on a CPU unless something says otherwise; vLLM itself would take most of the machine's memory."""

SHUTDOWN_SECONDS = 30
"""How long running requests may go on after a signal; with vLLM's own 0 it kills the engine instead of ending it.

When it is over vLLM kills the engine and its workers, so what the requests take is not left for the workers to end:
it is longer than ``WORKER_SHUTDOWN_SECONDS``.
"""

WORKER_SHUTDOWN_SECONDS = 20
"""How long a worker may take to end before vLLM kills it.

It waits one after the other for transfers that run (``JOIN_SECONDS`` of ``connector_worker.py``, 5), for answers
that it owes the scheduler (some calls to the pool, a second each at most), and for its pool to be closed
(``CLOSE_SECONDS`` of ``store/local/backend.py`` and ``store/mooncake/connection.py``, 10). ``GRACE_SECONDS`` of
``children.py`` is longer than this. Whoever is killed loses only what is not in the pool's files yet.
"""

_KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

_EPILOG = """\
Every other option goes to vLLM unchanged and wins over what this command sets, for example --block-size 32,
--max-num-seqs 64, --num-gpu-blocks-override 200; so does all that follows a lone "--".
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the command line. Options that are not known here end up in ``args.passthrough``."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model with the user-granular KV cache",
        description="Serve a model over vLLM's OpenAI-compatible HTTP API with the user-granular KV cache.",
        epilog=_EPILOG,
        allow_abbrev=False,  # An abbreviation of ours may be an option of vLLM's.
    )
    parser.add_argument(
        "--model",
        default=DEMO_RANKER_NAME,
        help="directory of a model, its name on a hub, or a bundled one: userkv-demo-ranker ranks, userkv-demo "
        "generates (default: %(default)s)",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="name of the model in the API")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks one (default: %(default)s)")
    parser.add_argument(
        "--max-users",
        metavar="N",
        help=f"users whose KV stays in HBM at most; 0 = no limit (default: ${settings.MAX_USERS}, else 100)",
    )
    parser.add_argument(
        "--min-free-blocks",
        metavar="N",
        help="KV blocks kept free by evicting users; 0 = as many as ordinary prefixes need "
        f"(default: ${settings.MIN_FREE_BLOCKS}, else 0)",
    )
    parser.add_argument(
        "--kv-cache-gib",
        type=float,
        metavar="GIB",
        help=f"size of the KV cache (default on a CPU: ${_KV_SPACE_VARIABLE}, else {DEFAULT_KV_CACHE_GIB:g})",
    )
    pool_options.add_options(parser)
    parser.add_argument("--no-users", action="store_true", help="leave vLLM as it is, without the user-granular cache")
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own log and tracebacks")
    parser.set_defaults(run=run, takes_passthrough=True)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM (returns 0, or raises ``SystemExit(0)``) or until the engine dies (returns 1).

    Raises:
        UserKVError: the server cannot start like this; the message says what to change.

    """
    turn_interrupts_into_sigterm()
    if not args.no_users:
        check_plugin(os.environ)
    plan = plan_launch(args, os.environ, on_cpu=vllm_is_for_cpu())
    for name, value in plan.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    print(f"userkv: starting vLLM with {plan.model}, about half a minute", file=sys.stderr, flush=True)
    # Late: vLLM reads its environment when it is imported.
    from userkv.serving.server import serve

    with pool_options.naming_flags(args, plan.pool):
        return serve(plan, verbose=args.verbose)


def plan_launch(args: argparse.Namespace, env: Mapping[str, str], *, on_cpu: bool) -> LaunchPlan:
    """Check the options and turn them into vLLM's options and environment; writes the demo model if it is needed.

    Raises:
        UserKVError: an option or variable cannot be used, the model does not exist, or the port is taken.

    """
    passthrough: Sequence[str] = args.passthrough
    if passthrough and not passthrough[0].startswith("-"):
        raise UserKVError(f"unexpected argument {passthrough[0]!r}; name the model with --model")
    if args.kv_cache_gib is not None and not args.kv_cache_gib > 0:
        raise InvalidSettingError(f"--kv-cache-gib must be more than 0, not {args.kv_cache_gib:g}")
    if on_cpu and args.kv_cache_gib is not None and args.kv_cache_gib * GIB > psutil.virtual_memory().total:
        raise InvalidSettingError(f"--kv-cache-gib {args.kv_cache_gib:g} is more than this machine's memory; set less")
    environment = _environment(args, env)
    # vLLM takes underscores, and a part of the option ("--kv-transfer-config.kv_role"), too.
    names = {re.split(r"[=.]", word)[0].replace("_", "-") for word in passthrough}
    theirs = any(name in pool_options.TRANSFER_OPTIONS for name in names)
    without = "--kv-transfer-config" if theirs else "--no-users" if args.no_users else ""
    pool = pool_options.pool_settings(args, env, without)
    port = available_port(args.host, args.port)
    model = resolve_model(args.model)
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = env.get("HF_HUB_OFFLINE", "1")
    demo = args.model in (DEMO_MODEL_NAME, DEMO_RANKER_NAME)
    ranking = ranking_arguments(Path(model))
    served_name = args.served_model_name or (args.model if demo else model)
    return LaunchPlan(
        model=model,
        served_name=served_name,
        host=args.host,
        port=port,
        users=not args.no_users,
        pool=pool,
        ranks=is_ranking_model(Path(model)) or any(CONFIG_KEY in word for word in passthrough),
        vllm_arguments=[
            *("--model", model, "--served-model-name", served_name, "--host", args.host, "--port", str(port)),
            "--enable-prompt-tokens-details",
            "--enable-prefix-caching",
            *("--shutdown-timeout", str(SHUTDOWN_SECONDS)),
            *(_as_options(DEMO_ENGINE_ARGUMENTS, without={*names, *ranking}) if demo else ()),
            *ranking,
            *pool_options.transfer_arguments(pool),
            *_kv_cache_arguments(args.kv_cache_gib, env, on_cpu),
            *(() if args.verbose else ("--uvicorn-log-level", "warning")),
            *passthrough,  # Last, so that they win.
        ],
        environment=environment,
    )


def _as_options(arguments: Mapping[str, object], without: Set[str]) -> list[str]:
    """Arguments as options, but those that are given otherwise: vLLM warns of options that it gets twice."""
    options = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if option not in without:
            options += [option] if value is True else [option, str(value)]
    return options


def _environment(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, str | None]:
    environment: dict[str, str | None] = {settings.ENABLE: "0" if args.no_users else "1"}
    for option, variable, value in (
        ("--max-users", settings.MAX_USERS, args.max_users),
        ("--min-free-blocks", settings.MIN_FREE_BLOCKS, args.min_free_blocks),
    ):
        if value is not None:
            if not (value.isascii() and value.isdigit()):
                raise InvalidSettingError(f"{option} must be a whole number of 0 or more, not {value!r}")
            environment[variable] = value
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
        environment[_KV_SPACE_VARIABLE] = None  # vLLM lets the variable win over the option.
    return environment


def _kv_cache_arguments(gib: float | None, env: Mapping[str, str], on_cpu: bool) -> tuple[str, ...]:
    if gib is None:
        if not on_cpu or env.get(_KV_SPACE_VARIABLE):
            return ()
        gib = DEFAULT_KV_CACHE_GIB
    return "--kv-cache-memory-bytes", str(int(gib * GIB))


def vllm_is_for_cpu() -> bool:
    """Whether the installed vLLM runs on the CPU, told by its package and so without importing it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise UserKVError("vLLM is not installed; install userkv[cpu] or userkv[cuda]")


def check_plugin(env: Mapping[str, str]) -> None:
    """Make sure that vLLM will load our plugin; it would serve without users otherwise, and say nothing.

    Raises:
        UserKVError: the package is not installed, or ``VLLM_PLUGINS`` leaves it out.

    """
    if not metadata.entry_points(group="vllm.general_plugins", name="userkv"):
        raise UserKVError("the userkv package is not installed, so vLLM would not load it; run pip install -e .")
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and "userkv" not in allowed.split(","):
        raise UserKVError(f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading userkv; add userkv to it")


def plugins(env: Mapping[str, str]) -> str:
    """``VLLM_PLUGINS`` with which ``/v1/rank`` is served and nothing else changes.

    vLLM loads plugins that add HTTP routes only if they are named there, and then of all kinds those alone.
    """
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None:
        return allowed
    found = metadata.entry_points()
    groups = [found.select(group=group) for group in found.groups if group.startswith("vllm.")]
    return ",".join(sorted({entry.name for group in groups for entry in group}))


def available_port(host: str, port: int) -> int:
    """``port`` if a server can listen on it, or a free port if ``port`` is 0.

    Raises:
        UserKVError: the port is in use or cannot be used, or the host is not one of this machine.

    """
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536.
        raise UserKVError(f"port {port} is not between 0 and 65535; change --port")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is in use; stop what listens there or choose another with --port (0 picks a free one)"
        else:
            reason = f"cannot be listened on ({error}); change --host or --port"
        raise UserKVError(f"port {port} on {host} {reason}") from error
