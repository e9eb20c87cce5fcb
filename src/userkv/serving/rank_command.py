"""``userkv rank``: ranking requests from a file, standard input or the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from userkv.core.errors import InvalidInputFileError, InvalidSettingError

if TYPE_CHECKING:  # The client takes a moment to import, which the other commands should not wait for.
    from userkv.client import RankRequest, RankResult

API_KEY = "USERKV_API_KEY"
_SINGLE = ("user", "history", "candidates")

_DESCRIPTION = """\
Score users' candidates on a running server. FILE (- is standard input) has one request per line:
{"user_id": "u1", "history": [1, 2, 3], "candidates": [4, 5], "top_k": 1}
or give one request with --user, --history and --candidates. Exit status: 0, or 2 at the first request that cannot be
answered; the message names its line.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``rank`` to the command line."""
    parser = subparsers.add_parser(
        "rank",
        help="score candidates for users on a running server",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="requests as JSON lines; - for standard input")
    add("--server", metavar="URL", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    add("--model", metavar="NAME", help="name of the model (default: the one that the server has)")
    add("--user", metavar="ID", help="the user of a single request")
    add("--history", metavar="ITEMS", help="his history, oldest first: 17,4,256 or JSON ([[16, 520], [18, 611]])")
    add("--candidates", metavar="ITEMS", help="the items to score, likewise")
    add("--top-k", metavar="N", type=int, help="length of the ranking (default: all candidates)")
    add("--prefill", action="store_true", help="only have the history of --user computed and kept")
    add("--json", action="store_true", help="print the answers as JSON lines instead of tables")
    add("--timeout", metavar="S", type=float, default=30.0, help="seconds to wait for an answer (default: %(default)g)")
    add("--api-key", metavar="KEY", help=f"what the server was given as --api-key (default: ${API_KEY})")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the requests and print the answers, each as soon as it is there; returns 0.

    Raises:
        UserKVError: an option, a line or the server cannot be used; the message says what to change.

    """
    from userkv.client import RankAuthError, RankClient, RankRequestError

    single = _check_options(args)
    api_key = args.api_key if args.api_key is not None else os.environ.get(API_KEY)
    with RankClient(args.server, model=args.model, api_key=api_key, timeout_s=args.timeout) as client:
        for place, request in [("", _from_options(args))] if single else _from_file(args):
            try:
                result = client.send(request)
            except RankAuthError:
                raise
            except RankRequestError as error:
                if place:
                    raise InvalidInputFileError(f"{place}: {error}") from error
                raise
            _print(request, result, as_json=args.json)
    return 0


def _check_options(args: argparse.Namespace) -> bool:
    """Whether the options are a request of their own."""
    single = args.user is not None
    given = [name for name in _SINGLE if getattr(args, name) is not None] + ["prefill"] * args.prefill
    if args.file is None and not single:
        raise InvalidSettingError("there is nothing to rank; name a FILE (- is standard input), or give --user")
    if args.file is not None and given:
        raise InvalidSettingError(f"--{given[0]} is for a single request; leave it or FILE out")
    if single and args.history is None:
        raise InvalidSettingError("--user needs --history (and --candidates, unless --prefill is given)")
    if args.top_k is not None and args.top_k < 1:
        raise InvalidSettingError(f"--top-k must be at least 1, not {args.top_k}")
    return single


def _from_options(args: argparse.Namespace) -> RankRequest:
    from userkv.client.request import parse_request

    fields: dict[str, Any] = {"user_id": args.user, "history": _items("--history", args.history)}
    if args.candidates is not None:
        fields["candidates"] = _items("--candidates", args.candidates)
    if args.prefill:
        fields["stage"] = "prefill"
    if args.top_k is not None:
        fields["top_k"] = args.top_k
    return parse_request(json.dumps(fields))


def _items(option: str, text: str) -> list[Any]:
    try:
        items = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except (ValueError, RecursionError):
        raise InvalidSettingError(f"{option} must be items like 17,4,256, not {text[:80]!r}") from None
    assert isinstance(items, list)
    return items


def _from_file(args: argparse.Namespace) -> Iterator[tuple[str, RankRequest]]:
    """Requests, with file and line number of each."""
    from userkv.client.request import BadFieldError, parse_request

    name = "standard input" if args.file == "-" else args.file
    try:
        with open(0 if args.file == "-" else args.file, "rb", closefd=args.file != "-") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{name}, line {number}"
                try:
                    request = parse_request(line)
                except BadFieldError as error:
                    raise InvalidInputFileError(f"{place}: {error}") from None
                if request.top_k is None:
                    request.top_k = args.top_k
                yield place, request
    except OSError as error:
        raise InvalidInputFileError(f"{name} cannot be read ({error.strerror or error}); name another FILE") from error


def _print(request: RankRequest, result: RankResult, *, as_json: bool) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(result).decode(), flush=True)
        return
    usage, cached = result.usage, result.usage.cached_tokens
    tiers = ", ".join(f"{count} {tier}" for tier in ("hbm", "dram", "ssd") if (count := getattr(cached, tier)))
    dropped = f", {usage.history_items_dropped} oldest items left out" if usage.history_items_dropped else ""
    print(
        f"{request.user_id}: history of {usage.history_tokens} tokens, {cached.total} from the cache"
        f"{f' ({tiers})' if tiers else ''}{dropped}; {result.timing.total_ms:.1f} ms"
    )
    for line in _table(result):
        print(line)
    sys.stdout.flush()


def _table(result: RankResult) -> Iterator[str]:
    """The ranking, best first. Of equal scores the earlier candidate is the better one, as the server has it."""
    best = sorted(result.scores, key=lambda score: -score.score)[: len(result.ranking)]
    if not best:
        return
    tasks = list(best[0].tasks or ())
    rows = [["rank", "item", "score", *tasks]]
    for rank, score in enumerate(best, 1):
        values = [score.score, *((score.tasks or {}).get(task, float("nan")) for task in tasks)]
        rows.append([str(rank), str(score.item).replace(" ", ""), *(f"{value:.6f}" for value in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
