"""The commands ``userkv replay`` and ``userkv generate``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from userkv.serving import pool_options
from userkv.serving.rank_command import API_KEY

if TYPE_CHECKING:  # argparse hides the type that add_subparsers() returns
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_REPLAY = """Send the requests of a log or workload file to a model server, or to an engine in this process, and report
which part of the prompts came out of the cache and how long the answers took. Exit status: 0 if all requests were
answered, 1 if any failed, 2 if file or options cannot be used."""

_GENERATE = """Write a workload file with the shape of a large recommender's log: a few users issue most of the
requests, history lengths have a long tail, users come in bursts, histories grow, candidates are always fresh."""


def add_parsers(subparsers: _SubParsers) -> None:
    """Adds the commands; each sets ``run``, a function of the parsed arguments that returns the exit status."""
    _add_replay(subparsers.add_parser("replay", help="replay a log or workload and measure", description=_REPLAY))
    _add_generate(subparsers.add_parser("generate", help="generate a workload file", description=_GENERATE))


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="log or workload file, plain or gzip")
    add("--format", metavar="NAME", help="otto, ratings, kuairand or workload (default: by the first line)")
    add("--server", metavar="URL", help="address of the model server, such as http://127.0.0.1:8000")
    add(
        "--offline",
        metavar="MODEL_DIR",
        help="run this model in an engine of this process instead; demo: the bundled model",
    )
    add("--engine-arg", metavar="K=V", action="append", default=[], help="vLLM engine argument (offline; repeatable)")
    pool_options.add_options(parser, default="none")
    add("--model", metavar="NAME", help="name of the model on the server (default: its first one)")
    add("--api-key", metavar="KEY", help=f"what the server was given as --api-key (default: ${API_KEY})")
    add("--no-users", action="store_true", help="name no users, so that only vLLM's own prefix cache is at work")
    add("--every", metavar="N", help="issue a request every N events of a user (logs; default 10)")
    add("--candidates", metavar="LO:HI", help="fresh candidates per request (logs; default 32:64)")
    add("--min-history", metavar="N", help="items a user has before his first request (logs; default 1)")
    add("--max-history", metavar="N", help="longest history in items; beyond, its older half goes (logs; default 4000)")
    add("--max-requests", metavar="N", help="stop after N requests (default: all)")
    add("--speed", metavar="X", default="max", help="follow the timestamps X times as fast, or 'max' (default)")
    add("--concurrency", metavar="N", default="4", help="requests at once with --speed max (default 4)")
    add("--warmup", metavar="N", default="1", help="throw-away requests before measuring (default 1)")
    add("--phases", metavar="N", default="4", help="report in N equal slices (default 4)")
    add("--max-tokens", metavar="N", default="1", help="tokens to generate per request (default 1)")
    add("--timeout", metavar="S", default="300", help="seconds until a request counts as failed (default 300)")
    add(
        "--cpu-of",
        metavar="PID",
        action="append",
        default=[],
        help="count the CPU time of this process and its children, too (repeatable)",
    )
    add(
        "--metrics",
        metavar="URL",
        action="append",
        default=[],
        help="report what this Prometheus page counts meanwhile, too (repeatable)",
    )
    add("--digits", metavar="N", help="tokens per item (default: what the workload file says, else 2)")
    add("--vocab-size", metavar="N", help="tokens of the model (default: offline from its config.json, else 4352)")
    add("--seed", metavar="N", default="0", help="seed of the candidates (logs; default 0)")
    add("--skip-bad", action="store_true", help="count and skip malformed lines instead of stopping at the first")
    add("--json", metavar="PATH", nargs="?", const="-", help="report as JSON to PATH, or alone to standard output")
    parser.set_defaults(run=_run_replay)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="workload file to write; compressed if it ends in .gz; - for standard output")
    add("--users", metavar="N", default="200", help="size of the population (default 200)")
    add("--requests", metavar="N", default="1000", help="number of requests (default 1000)")
    add("--zipf", metavar="S", default="1.0", help="exponent of the users' popularity, 0 for uniform (default 1.0)")
    add("--median-history", metavar="N", default="512", help="median history at the first request, items (default 512)")
    add("--p90-ratio", metavar="X", default="2.861", help="90th percentile of that by the median (default 2.861)")
    add(
        "--max-history", metavar="N", default="4000", help="longest history; beyond, its older half goes (default 4000)"
    )
    add("--growth", metavar="X", default="8", help="mean items appended between a user's requests (default 8)")
    add("--candidates", metavar="LO:HI", default="32:64", help="fresh candidates per request (default 32:64)")
    add("--items", metavar="N", default="100000", help="number of different items (default 100000)")
    add("--digits", metavar="N", help="note in the file how many tokens an item is meant to take")
    add("--seed", metavar="N", default="0", help="equal seeds give equal files (default 0)")
    parser.set_defaults(run=_run_generate)


def _run_replay(args: argparse.Namespace) -> int:
    # Imported on use: `userkv --help` and the other commands should not wait for aiohttp and numpy.
    from userkv.replay.command import replay_command

    return replay_command(args)


def _run_generate(args: argparse.Namespace) -> int:
    from userkv.core import options
    from userkv.logs.workload_file import dump_workload, write_workload
    from userkv.replay.generator import GeneratorSettings, generate

    requests = generate(
        GeneratorSettings(
            users=options.whole_number("--users", args.users),
            requests=options.whole_number("--requests", args.requests),
            zipf=options.number("--zipf", args.zipf),
            median_history=options.whole_number("--median-history", args.median_history),
            p90_ratio=options.number("--p90-ratio", args.p90_ratio),
            max_history=options.whole_number("--max-history", args.max_history, 2),
            growth=options.number("--growth", args.growth),
            candidates=options.number_range("--candidates", args.candidates),
            items=options.whole_number("--items", args.items),
            seed=options.whole_number("--seed", args.seed, 0),
        )
    )
    digits = None if args.digits is None else options.whole_number("--digits", args.digits)
    if args.file == "-":
        dump_workload(requests, sys.stdout, digits)
    else:
        count = write_workload(requests, Path(args.file), digits)
        print(f"wrote {count} requests to {args.file}", file=sys.stderr)
    return 0
