"""The command ``userkv train``: its options. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # argparse hides the type that add_subparsers() returns
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """Train an HSTU ranker on a log of what users did, on the CPU, and write a directory that userkv serve
--model takes. Each user's last event is kept for the test: the report says how high the model ranks it among all items
that the user did not know, next to a ranking by popularity."""


def add_parser(subparsers: _SubParsers) -> None:
    """Adds the command; it sets ``run``, a function of the parsed arguments that returns the exit status."""
    parser = subparsers.add_parser("train", help="train a ranker on a log", description=_DESCRIPTION)
    add = parser.add_argument
    add(
        "--data",
        metavar="PATH",
        help="log, plain or gzip (default: movielens-latest-small/ratings.csv in $USERKV_DATA, else ../shared/data)",
    )
    add("--format", metavar="NAME", help="otto, ratings (MovieLens) or kuairand (default: by the first line)")
    add("--output", metavar="DIR", required=True, help="new directory of the model")
    add("--epochs", metavar="N", help="times that every event is learned from")
    add("--window", metavar="N", help="longest history in items; a full window drops a quarter at once")
    add("--layers", metavar="N", help="layers of the model")
    add("--dim", metavar="N", help="width of the model")
    add("--heads", metavar="N", help="attention heads; the width is shared among them")
    add("--learning-rate", metavar="X", help="at its highest")
    add("--seed", metavar="N", help="equal seeds give equal models on the same machine")
    add("--skip-bad", action="store_true", help="skip malformed lines instead of stopping at the first")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # Imported on use: torch takes seconds, and other commands should not wait for it.
    from userkv.train.command import train_command

    return train_command(args)
