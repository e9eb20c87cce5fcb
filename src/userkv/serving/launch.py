"""``userkv serve``: vLLM's OpenAI API server with the user-granular cache switched on, in this process."""

from __future__ import annotations

import argparse
import os
import sys

from userkv.cache import settings
from userkv.serving import pool_options
from userkv.serving.demo_model import DEMO_RANKER_NAME
from userkv.serving.launch_plan import DEFAULT_KV_CACHE_GIB, KV_SPACE_VARIABLE, plan_launch
from userkv.serving.preconditions import check_plugin, vllm_is_for_cpu
from userkv.serving.signals import turn_interrupts_into_sigterm

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
        help=f"size of the KV cache (default on a CPU: ${KV_SPACE_VARIABLE}, else {DEFAULT_KV_CACHE_GIB:g})",
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
