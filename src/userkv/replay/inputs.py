"""From the options of ``userkv replay`` to the requests that they ask for."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from userkv.core import options
from userkv.core.errors import InvalidInputFileError, InvalidSettingError
from userkv.logs.detect import FORMATS, WORKLOAD, detect_format
from userkv.logs.events import BadLines
from userkv.logs.formats import read_events
from userkv.logs.work_request import WorkRequest
from userkv.logs.workload_file import read_workload
from userkv.replay.workload import build_requests

DEFAULT_EVERY = 10
DEFAULT_CANDIDATES = "32:64"
DEFAULT_MIN_HISTORY = 1
DEFAULT_MAX_HISTORY = 4_000

_LOG_ONLY = ("every", "candidates", "min_history", "max_history")


@dataclass(frozen=True, slots=True)
class Input:
    """What was read.

    format: name of the format. bad: skipped lines. tokens_per_item: what a workload file asks for, or None.
    log_options: how requests were made from a log, None for a workload file.
    """

    requests: list[WorkRequest]
    format: str
    bad: BadLines
    tokens_per_item: int | None
    log_options: dict[str, Any] | None


def read_input(args: Namespace) -> Input:
    """Reads ``args.file``. Raises InvalidInputFileError for its faults, InvalidSettingError for those of options."""
    path = Path(args.file)
    if args.format is not None and args.format not in FORMATS:
        raise InvalidSettingError(f"--format must be one of {', '.join(FORMATS)}, not {args.format!r}.")
    form = args.format or detect_format(path)
    limit = None if args.max_requests is None else options.whole_number("--max-requests", args.max_requests)
    if form == WORKLOAD:
        for name in _LOG_ONLY:
            if getattr(args, name) is not None:
                raise InvalidSettingError(
                    f"--{name.replace('_', '-')} is for logs and must be left out: a workload file has its requests."
                )
        workload = read_workload(path, skip_bad=args.skip_bad)
        found = Input(list(islice(workload.requests, limit)), form, workload.bad, workload.tokens_per_item, None)
    else:
        found = _from_log(path, form, limit, args)
    if not found.requests:
        raise InvalidInputFileError(
            f"{path} gives no request: no line is usable, or no user reaches --every events and --min-history items."
        )
    return found


def _from_log(path: Path, form: str, limit: int | None, args: Namespace) -> Input:
    log_options: dict[str, Any] = {
        "every": options.whole_number("--every", _given(args.every, DEFAULT_EVERY)),
        "candidates": options.number_range("--candidates", _given(args.candidates, DEFAULT_CANDIDATES)),
        "min_history": options.whole_number("--min-history", _given(args.min_history, DEFAULT_MIN_HISTORY)),
        "max_history": options.whole_number("--max-history", _given(args.max_history, DEFAULT_MAX_HISTORY), 2),
        "seed": options.whole_number("--seed", args.seed, 0),
    }
    events, bad = read_events(path, form, skip_bad=args.skip_bad)
    return Input(list(build_requests(events, max_requests=limit, **log_options)), form, bad, None, log_options)


def _given(value: str | None, default: int | str) -> str:
    return str(default) if value is None else value
