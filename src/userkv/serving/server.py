"""Runs vLLM's API server in this process and ends it cleanly. Importing this imports vLLM."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs

from userkv.cache.settings import CacheSettings
from userkv.core.errors import UserKVError
from userkv.serving.banner import start_banner
from userkv.serving.child_processes import adopt_orphans, end_children
from userkv.serving.launch_plan import LaunchPlan


class _SignalNotingLoop(uvloop.Loop):
    """vLLM returns in the same way after a signal and after its engine died; this loop knows which it was."""

    signalled = False

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: object) -> None:
        def note_and_call() -> None:
            if not self.signalled:
                print("userkv: stopping; running requests may end first", file=sys.stderr, flush=True)
            self.signalled = True
            callback(*args)

        super().add_signal_handler(sig, note_and_call)


def serve(plan: LaunchPlan, *, verbose: bool) -> int:
    """Serve until SIGINT or SIGTERM (returns 0) or until the engine dies (returns 1).

    Raises:
        SystemExit: with 0, if a signal arrived before the server was up.
        UserKVError: vLLM refuses the options or the model.

    """
    adopt_orphans()
    cli_env_setup()
    loop = _SignalNotingLoop()
    banner_stop = start_banner(plan, CacheSettings.from_env(os.environ))
    try:
        args = _parse(plan.vllm_arguments)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_run_server(args))
    except UserKVError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        if verbose:
            raise
        raise UserKVError(f"vLLM did not start: {_one_line(error)} (--verbose shows all)") from error
    finally:
        banner_stop.set()
        end_children()
    return 0 if loop.signalled else 1


async def _run_server(args: Any) -> None:
    """vLLM's ``run_server`` without its signal handler, whose exception is lost on the way."""
    decorate_logs("APIServer", skip_if_decorated=True)
    listen_address, sock = setup_server(args, reuse_port=False)
    await run_server_worker(listen_address, sock, args)


def _parse(arguments: list[str]) -> Any:
    parser = make_arg_parser(FlexibleArgumentParser(prog="userkv serve"))
    parser.error = _refuse
    args = parser.parse_args(arguments)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    return args


def _refuse(message: str) -> NoReturn:
    raise UserKVError(f"vLLM refuses the options: {message}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
