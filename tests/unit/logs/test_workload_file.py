"""Workload files: what is written is read back, and what is wrong is named by its line."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userkv.core.errors import InvalidInputFileError, InvalidSettingError
from userkv.logs.detect import detect_format
from userkv.logs.events import Event
from userkv.logs.work_request import WorkRequest
from userkv.logs.workload_file import read_workload, write_workload
from userkv.replay.generator import GeneratorSettings, generate
from userkv.replay.workload import build_requests

HEADER = '{"userkv_workload": 1}'
FIRST = {"time": 1, "user": "a", "new_items": [1, 2, 3], "history_items": 3, "candidates": [9]}
SECOND = {"time": 2, "user": "a", "new_items": [4], "drop": 2, "history_items": 2, "candidates": [8, 7]}


def write(tmp_path: Path, *lines: str | dict[str, Any]) -> Path:
    path = tmp_path / "workload"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_lines_become_requests(tmp_path: Path) -> None:
    path = write(tmp_path, '{"userkv_workload": 1, "tokens_per_item": 3, "made_by": "hand"}', FIRST, "", SECOND)
    assert detect_format(path) == "workload"
    workload = read_workload(path)
    assert workload.tokens_per_item == 3
    assert workload.requests == [
        WorkRequest(1.0, "a", (1, 2, 3), 3, (9,)),
        WorkRequest(2.0, "a", (4,), 2, (8, 7), drop=2),
    ]


@settings(max_examples=30)
@given(
    events=st.lists(st.builds(Event, st.sampled_from("ab"), st.floats(0, 1e9), st.integers(0, 2**63 - 1)), max_size=30),
    max_history=st.none() | st.integers(2, 5),
    tokens=st.none() | st.integers(1, 4),
    suffix=st.sampled_from(["jsonl", "jsonl.gz"]),
    anonymous=st.sets(st.integers(0, 15)),
)
def test_written_and_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[Event],
    max_history: int | None,
    tokens: int | None,
    suffix: str,
    anonymous: set[int],
) -> None:
    others = [Event("nobody", 0.0, item) for item in range(1000, 1050)]
    requests = list(build_requests(events + others, every=3, candidates=(1, 3), max_history=max_history))
    requests = [replace(each, anonymous=number in anonymous) for number, each in enumerate(requests)]
    path = tmp_path_factory.mktemp("written") / f"w.{suffix}"
    assert write_workload(requests, path, tokens) == len(requests)
    read = read_workload(path)
    assert (read.requests, read.tokens_per_item, read.bad.count) == (requests, tokens, 0)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_equal_workloads_are_equal_files(tmp_path: Path) -> None:
    small = GeneratorSettings(users=5, requests=20, median_history=10, items=1000)
    for name in ("a.gz", "b.gz"):
        write_workload(generate(small), tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()).startswith(HEADER.encode())


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match="cannot be written"):
        write_workload([], tmp_path / "missing" / "w.jsonl")


def test_a_failure_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("old")

    def interrupted() -> Iterator[WorkRequest]:
        yield WorkRequest(0.0, "a", (1,), 1, (2,))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_workload(interrupted(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["w.jsonl"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("{", "not valid JSON"),
        ("{}", '"userkv_workload" is missing'),
        ('{"userkv_workload": 2}', "version 2 is not supported"),
        ('{"userkv_workload": true}', "version True is not supported"),
        ('{"userkv_workload": 1, "tokens_per_item": 0}', "tokens_per_item must be at least 1"),
        ('{"userkv_workload": 1, "tokens_per_item": "2"}', "tokens_per_item must be an integer"),
    ],
)
def test_a_wrong_header(tmp_path: Path, header: str, reason: str, skip_bad: bool) -> None:
    path = write(tmp_path, header, FIRST)
    with pytest.raises(InvalidInputFileError, match="line 1: ") as caught:
        read_workload(path, skip_bad=skip_bad)
    assert reason in str(caught.value)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputFileError, match="line 1"):
        read_workload(write(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"time": None}, "time must be a number"),
        ({"time": -1}, "time is negative"),
        ({"time": 0.5}, "earlier than that of the request before"),
        ({"user": ""}, "user is blank"),
        ({"user": 1.5}, "user must be"),
        ({"new_items": 4}, '"new_items" must be a list'),
        ({"new_items": [4.0]}, "new_items must be an integer"),
        ({"new_items": [-4]}, "new_items is negative"),
        ({"candidates": None}, '"candidates" must be a list'),
        ({"candidates": ["x"]}, "candidates must be an integer"),
        ({"drop": -1}, "drop is negative"),
        ({"drop": 5}, "drop 5 is more than the history of 4"),
        ({"drop": "2"}, "drop must be an integer"),
        ({"history_items": 3}, "history_items is 3, but the lines so far give 2"),
        ({"history_items": True}, "history_items must be an integer"),
        ({"anonymous": 1}, "anonymous must be true or false"),
        ({"anonymous": None}, "anonymous must be true or false"),
        ({"user": "new", "new_items": [], "drop": 0, "history_items": 0, "candidates": []}, "the request is empty"),
    ],
)
def test_a_malformed_line(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write(tmp_path, HEADER, FIRST, {**SECOND, **change}, {**SECOND, "drop": 0, "history_items": 4})
    with pytest.raises(InvalidInputFileError, match="line 3: ") as caught:
        read_workload(path)
    assert reason in str(caught.value)
    workload = read_workload(path, skip_bad=True)
    assert [number for number, _ in workload.bad.examples] == [3]
    assert [request.history_items_total for request in workload.requests] == [3, 4]


@pytest.mark.parametrize("key", ["time", "user", "new_items", "history_items", "candidates"])
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, HEADER, {name: value for name, value in FIRST.items() if name != key})
    with pytest.raises(InvalidInputFileError, match=f'line 2: "{key}" is missing'):
        read_workload(path)


def test_after_a_skipped_line_lengths_are_computed_anew(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, "torn", SECOND | {"drop": 0}, {**SECOND, "drop": 1, "history_items": 5})
    with pytest.raises(InvalidInputFileError, match="line 2"):
        read_workload(path)
    workload = read_workload(path, skip_bad=True)
    assert [request.history_items_total for request in workload.requests] == [1, 1]
    assert workload.bad.count == 1
