"""The command ``python -m benchmarks.suite``, which ``make bench`` and ``make bench-quick`` run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks.suite.command import bench_command
from userkv.core.errors import UserKVError

_DESCRIPTION = """Compare systems on this machine: stock vLLM, its peers' KV pools and UserKV,
on the same workloads, in turn. Writes the figures and how far the goals are met as JSON, and the tables as Markdown
beside it. Exit status: 0, 1 if a system or a script has failed, 2 if options cannot be used. Some peers need an
environment: make bench-peers."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=_DESCRIPTION)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer requests, systems and scenarios: each goal once")
    add("--scenarios", metavar="A,B", help="only these (default: all)")
    add("--systems", metavar="A,B", help="only these (default: those of each scenario)")
    add("--requests", metavar="N", help="at most so many per scenario (default: what each is meant to have)")
    add("--parts", metavar="A,B", help="scenarios, policies (simulated), micro (scripts of benchmarks/); default: all")
    add("--repeat", metavar="N", default="1", help="runs of each system, in turn with the others (default 1)")
    add("--resume", action="store_true", help="go on with what --json has already")
    add("--data", metavar="DIR", default=os.environ.get("USERKV_DATA", "../shared/data"), help="directory of the logs")
    add("--json", metavar="PATH", default="bench.json", help="where the figures go (default bench.json)")
    add("--plots", action="store_true", help="draw plots beside the figures (needs userkv[bench])")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for what the user can change, 130 after Ctrl-C."""
    try:
        return bench_command(build_parser().parse_args(argv))
    except UserKVError as error:
        print(f"userkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
