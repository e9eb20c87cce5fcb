"""The ``userkv`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import userkv
from userkv.core.errors import UserKVError
from userkv.replay import cli as bench_cli
from userkv.serving import launch, pool_command, rank_command
from userkv.train import cli as train_cli

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # What a shell reports for SIGINT.


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each sets ``run``, a function from parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="userkv", description="A user-granular KV cache for generative recommendation on vLLM."
    )
    parser.add_argument("--version", action="version", version=f"userkv {userkv.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    launch.add_parser(subparsers)
    rank_command.add_parser(subparsers)
    pool_command.add_parser(subparsers)
    bench_cli.add_parsers(subparsers)
    train_cli.add_parser(subparsers)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exits with 2 if it cannot be used, as argparse does."""
    parser = build_parser()
    ours, separator, rest = _split(argv)
    args, unknown = parser.parse_known_args(ours)
    if getattr(args, "takes_passthrough", False):
        args.passthrough = [*unknown, *rest]
    elif unknown or separator:
        parser.error(f"unrecognized arguments: {' '.join([*unknown, *separator, *rest])}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for what the user can change, 130 after Ctrl-C."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        return int(args.run(args))
    except UserKVError as error:
        print(f"userkv: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain once more when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, [], []
    at = words.index("--")
    return words[:at], ["--"], words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
