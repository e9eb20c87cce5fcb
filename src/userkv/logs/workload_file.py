"""Workload files: JSON lines that any program can write.

The first line is the header ``{"userkv_workload": 1}``, optionally with ``"tokens_per_item"`` (the number of tokens
that the author meant an item to take). Each further line is one request, in order of time::

    {"time": 12.5, "user": "u7", "new_items": [3, 9], "drop": 0, "history_items": 2, "candidates": [41, 17]}

``new_items`` are appended to the user's history, then the ``drop`` oldest items leave it (left out when 0), and
``history_items`` is the length that results: a check that no line was lost. A request with ``"anonymous": true`` names
no user to the target. Files may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from userkv.core.errors import InvalidInputFileError, InvalidSettingError
from userkv.logs.events import BadLines, BadValueError, item_id, read_lines, seconds, user_name
from userkv.logs.json_lines import json_object, required, required_list
from userkv.logs.work_request import WorkRequest

VERSION = 1
_KEY = "userkv_workload"


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload file that was read: its requests, its tokens_per_item (or None), and the lines that were skipped."""

    requests: list[WorkRequest]
    tokens_per_item: int | None
    bad: BadLines


def is_workload_header(first_line: str) -> bool:
    """Whether a file that starts with this line is a workload file (of any version)."""
    try:
        return _KEY in json_object(first_line)
    except BadValueError:
        return False


def write_workload(requests: Iterable[WorkRequest], path: Path, tokens_per_item: int | None = None) -> int:
    """Writes a workload file (compressed if the name ends in .gz) and returns the number of requests.

    The file appears under its name when it is complete. Raises InvalidSettingError if it cannot be written.
    """
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as raw, _packed(raw) if path.suffix == ".gz" else raw as packed:
            stream = io.TextIOWrapper(packed, encoding="utf-8")
            count = dump_workload(requests, stream, tokens_per_item)
            stream.flush()
            stream.detach()
        partial.replace(path)
    except OSError as error:
        raise InvalidSettingError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return count


def _packed(raw: IO[bytes]) -> gzip.GzipFile:
    # No file name and time in the gzip header, so that equal workloads are equal files.
    return gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)


def dump_workload(requests: Iterable[WorkRequest], stream: IO[str], tokens_per_item: int | None = None) -> int:
    """Writes header and requests to an open text stream and returns the number of requests."""
    header: dict[str, Any] = {_KEY: VERSION}
    if tokens_per_item is not None:
        header["tokens_per_item"] = tokens_per_item
    stream.write(json.dumps(header) + "\n")
    count = 0
    for request in requests:
        record: dict[str, Any] = {"time": request.time, "user": request.user, "new_items": request.new_items}
        if request.drop:
            record["drop"] = request.drop
        record["history_items"] = request.history_items_total
        record["candidates"] = request.candidates
        if request.anonymous:
            record["anonymous"] = True
        stream.write(json.dumps(record, separators=(",", ":")) + "\n")
        count += 1
    return count


def read_workload(path: Path, *, skip_bad: bool = False) -> Workload:
    """Reads a workload file. A wrong header always raises InvalidInputFileError, as does a malformed line.

    With ``skip_bad`` malformed lines are counted and left out. What they would have appended is then missing from
    the histories, so from the first such line on the lengths are computed anew instead of compared.
    """
    bad = BadLines(str(path), skip_bad)
    lines = read_lines(path, bad)
    number, first_line = next(lines, (1, ""))
    try:
        tokens_per_item = _header(first_line)
    except BadValueError as reason:
        raise InvalidInputFileError(f"{path}, line {number}: {reason}.") from reason
    requests: list[WorkRequest] = []
    lengths: dict[str, int] = {}
    for number, text in lines:
        try:
            request = _request(text, lengths, check_length=bad.count == 0)
            if requests and request.time < requests[-1].time:
                raise BadValueError(
                    f"time {request.time} is earlier than that of the request before ({requests[-1].time})"
                )
        except BadValueError as reason:
            bad.report(number, str(reason))
        else:
            lengths[request.user] = request.history_items_total
            requests.append(request)
    return Workload(requests, tokens_per_item, bad)


def _header(text: str) -> int | None:
    record = json_object(text)
    version = required(record, _KEY)
    if version != VERSION or isinstance(version, bool):
        raise BadValueError(f"workload version {version!r} is not supported (supported is {VERSION})")
    tokens = record.get("tokens_per_item")
    return None if tokens is None else _count(tokens, "tokens_per_item", 1)


def _request(text: str, lengths: dict[str, int], *, check_length: bool) -> WorkRequest:
    record = json_object(text)
    time = seconds(required(record, "time"), "time")
    user = user_name(required(record, "user"), "user")
    new_items = tuple(item_id(item, "new_items") for item in required_list(record, "new_items"))
    candidates = tuple(item_id(item, "candidates") for item in required_list(record, "candidates"))
    drop = _count(record.get("drop", 0), "drop", 0)
    stated = _count(required(record, "history_items"), "history_items", 0)
    length = lengths.get(user, 0) + len(new_items) - drop
    if length < 0:
        raise BadValueError(f"drop {drop} is more than the history of {length + drop} items")
    if check_length and length != stated:
        raise BadValueError(f"history_items is {stated}, but the lines so far give {length} (is a line missing?)")
    if length + len(candidates) == 0:
        raise BadValueError("the request is empty: neither history nor candidates")
    anonymous = record.get("anonymous", False)
    if not isinstance(anonymous, bool):
        raise BadValueError(f"anonymous must be true or false, not {anonymous!r}")
    return WorkRequest(time, user, new_items, length, candidates, drop, anonymous)


def _count(value: Any, what: str, minimum: int) -> int:
    count = item_id(value, what)
    if count < minimum:
        raise BadValueError(f"{what} must be at least {minimum}, not {count}")
    return count
