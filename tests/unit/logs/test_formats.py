"""The readers of public logs, on good and on hostile input."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userkv.core.errors import InvalidInputFileError, InvalidSettingError
from userkv.logs.detect import detect_format
from userkv.logs.events import BadLines, Event
from userkv.logs.formats import SOURCES, read_events

OTTO_GOOD = '{"session": 7, "events": [{"aid": 3, "ts": 1500, "type": "clicks"}, {"aid": 4, "ts": 2500}]}'
RATINGS_HEADER, RATINGS_GOOD = "userId,movieId,rating,timestamp", "1,31,2.5,1260759144"
KUAIRAND_HEADER, KUAIRAND_GOOD = "user_id,video_id,date,hourmin,time_ms,is_click", "0,11,20220421,1200,1650513600500,1"

HEADS = {"otto": [OTTO_GOOD], "ratings": [RATINGS_HEADER, RATINGS_GOOD], "kuairand": [KUAIRAND_HEADER, KUAIRAND_GOOD]}
GOOD = {"otto": OTTO_GOOD, "ratings": RATINGS_GOOD, "kuairand": KUAIRAND_GOOD}

BAD_LINES = [
    ("otto", '{"session": 7, "events": [', "not valid JSON"),
    ("otto", "session 7", "not valid JSON"),
    ("otto", "[1, 2]", "not a JSON object"),
    ("otto", "null", "not a JSON object"),
    ("otto", "[" * 100_000, "JSON"),
    ("otto", '{"session": 1, "events": [{"aid": ' + "9" * 5000 + ', "ts": 1}]}', "number too long"),
    ("otto", '{"events": []}', '"session" is missing'),
    ("otto", '{"session": 7}', '"events" is missing'),
    ("otto", '{"session": 7, "events": {}}', '"events" must be a list'),
    ("otto", '{"session": 7, "events": [5]}', "event 0 is not a JSON object"),
    ("otto", '{"session": null, "events": []}', "session must be"),
    ("otto", '{"session": true, "events": []}', "session must be"),
    ("otto", '{"session": -7, "events": []}', "session is negative"),
    ("otto", '{"session": " ", "events": []}', "session is blank"),
    ("otto", '{"session": "' + "x" * 300 + '", "events": []}', "longer than 256 bytes"),
    ("otto", '{"session": "\\ud800", "events": []}', "not valid Unicode"),
    ("otto", '{"session": 7, "events": [{"ts": 1}]}', 'event 0: "aid" is missing'),
    ("otto", '{"session": 7, "events": [{"aid": 1, "ts": 1}, {"aid": 1}]}', 'event 1: "ts" is missing'),
    ("otto", '{"session": 7, "events": [{"aid": "1", "ts": 1}]}', "aid must be an integer"),
    ("otto", '{"session": 7, "events": [{"aid": 1.0, "ts": 1}]}', "aid must be an integer"),
    ("otto", '{"session": 7, "events": [{"aid": -1, "ts": 1}]}', "aid is negative"),
    ("otto", '{"session": 7, "events": [{"aid": 9223372036854775808, "ts": 1}]}', "aid is larger"),
    ("otto", '{"session": 7, "events": [{"aid": 1, "ts": "now"}]}', "ts must be a number"),
    ("otto", '{"session": 7, "events": [{"aid": 1, "ts": NaN}]}', "ts is not finite"),
    ("otto", '{"session": 7, "events": [{"aid": 1, "ts": 1e999}]}', "ts is not finite"),
    ("otto", '{"session": 7, "events": [{"aid": 1, "ts": 1' + "0" * 400 + "}]}", "ts is too large"),
    ("otto", '{"session": 7, "events": [{"aid": 1, "ts": -1}]}', "ts is negative"),
    ("ratings", "1,31,2.5", "3 fields where the header has 4"),
    ("ratings", "1,31,2.5,9,9", "5 fields where the header has 4"),
    ("ratings", ",31,2.5,9", "userId is blank"),
    ("ratings", "  ,31,2.5,9", "userId is blank"),
    ("ratings", "-1,31,2.5,9", "userId is negative"),
    ("ratings", "1,,2.5,9", "movieId must be an integer"),
    ("ratings", "1,3.0,2.5,9", "movieId must be an integer"),
    ("ratings", "1,1_0,2.5,9", "movieId must be an integer"),
    ("ratings", "1,٣,2.5,9", "movieId must be an integer"),
    ("ratings", "1,-31,2.5,9", "movieId is negative"),
    ("ratings", "1,31,good,9", "rating must be a number"),
    ("ratings", "1,31,2.5,yesterday", "timestamp must be a number"),
    ("ratings", "1,31,2.5,nan", "timestamp must be a number"),
    ("ratings", "1,31,2.5,inf", "timestamp must be a number"),
    ("ratings", "1,31,2.5,-9", "timestamp is negative"),
    ("ratings", '1,"31,2.5,9', "not comma-separated"),
    ("ratings", "userId,movieId,rating,timestamp", "rating must be a number"),
    ("kuairand", "0,11,20220421,1200", "4 fields where the header has 6"),
    ("kuairand", "0,x,20220421,1200,1650513600500,1", "video_id must be an integer"),
    ("kuairand", "0,11,20220421,1200,,1", "time_ms must be a number"),
    ("kuairand", " ,11,20220421,1200,1,1", "user_id is blank"),
]


def write(tmp_path: Path, lines: list[str]) -> Path:
    path = tmp_path / "log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("source", "line", "reason"), BAD_LINES)
def test_a_malformed_line_is_named_and_can_be_skipped(tmp_path: Path, source: str, line: str, reason: str) -> None:
    # A blank line in front of it: it carries nothing, but it counts.
    path = write(tmp_path, [*HEADS[source], "", line, GOOD[source]])
    bad_line = len(HEADS[source]) + 2
    with pytest.raises(InvalidInputFileError) as caught:
        read_events(path, source)
    assert str(caught.value).startswith(f"{path}, line {bad_line}: ")
    assert reason in str(caught.value)
    events, bad = read_events(path, source, skip_bad=True)
    alone, _ = read_events(write(tmp_path, HEADS[source]), source)
    assert events == alone * 2
    assert (bad.count, [number for number, _ in bad.examples]) == (1, [bad_line])
    assert reason in bad.examples[0][1]


@pytest.mark.parametrize("source", SOURCES)
def test_bytes_that_are_no_text(tmp_path: Path, source: str) -> None:
    path = tmp_path / "log"
    path.write_bytes("\n".join(HEADS[source]).encode() + b"\n\xff\xfe\n")
    line = len(HEADS[source]) + 1
    with pytest.raises(InvalidInputFileError, match=f"line {line}: not UTF-8"):
        read_events(path, source)
    assert read_events(path, source, skip_bad=True)[1].examples == [(line, "not UTF-8 text")]


def test_only_the_first_few_bad_lines_are_kept(tmp_path: Path) -> None:
    events, bad = read_events(write(tmp_path, [RATINGS_HEADER, *["x"] * 100]), "ratings", skip_bad=True)
    assert events == []
    assert bad.count == 100
    assert [number for number, _ in bad.examples] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("otto", [Event("7", 1.5, 3), Event("7", 2.5, 4)]),
        ("ratings", [Event("1", 1260759144.0, 31)]),
        ("kuairand", [Event("0", 1650513600.5, 11)]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_good_lines_and_the_recognition_of_the_format(
    tmp_path: Path, source: str, expected: list[Event], packed: bool
) -> None:
    raw = ("\ufeff" + "\r\n".join(HEADS[source])).encode()  # byte order mark, Windows line ends, no final one
    path = tmp_path / ("log.gz" if packed else "log")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert detect_format(path) == source
    events, bad = read_events(path, source)
    assert events == expected
    assert bad == BadLines(str(path))


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, ['timestamp,"userId",extra,movieId,rating', '5,"u, v",,8,1'])
    assert read_events(path, detect_format(path))[0] == [Event("u, v", 5.0, 8)]


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("header", ["userId,movieId,timestamp", "1,31,2.5,9", '"userId'])
def test_a_wrong_header_cannot_be_skipped(tmp_path: Path, header: str, skip_bad: bool) -> None:
    path = write(tmp_path, [header, RATINGS_GOOD])
    with pytest.raises(InvalidInputFileError, match="line 1: "):
        read_events(path, "ratings", skip_bad=skip_bad)


@pytest.mark.parametrize("first", ["hello", '{"a": 1}', "userId;movieId;rating;timestamp", "[]", '"'])
def test_an_unknown_format_asks_for_the_option(tmp_path: Path, first: str) -> None:
    with pytest.raises(InvalidInputFileError, match="--format"):
        detect_format(write(tmp_path, [first]))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n \n")
    with pytest.raises(InvalidInputFileError, match="is empty"):
        detect_format(empty)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidInputFileError, match="cannot be read"):
            read_events(path, "otto")
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress((OTTO_GOOD + "\n").encode() * 5000)[:-200])
    with pytest.raises(InvalidInputFileError, match="cannot be read after line"):
        read_events(torn, "otto", skip_bad=True)


def test_an_unknown_source_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match="otto, ratings, kuairand"):
        read_events(write(tmp_path, [OTTO_GOOD]), "movielens")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["aid", "ts", "events"]), inner),
    max_leaves=6,
)


@settings(max_examples=40)
@given(lines=st.lists(st.fixed_dictionaries({"session": JSON, "events": st.lists(JSON)}) | JSON, max_size=5))
def test_any_json_is_an_event_or_a_bad_line(lines: list[object]) -> None:
    bad = BadLines("x", skip=True)
    texts = [(number, json.dumps(line)) for number, line in enumerate(lines, 1)]
    for event in SOURCES["otto"].read(iter(texts), bad):
        assert event.user
        assert event.item >= 0
        assert 0 <= event.time < float("inf")
    assert bad.count <= len(lines)


@given(rows=st.lists(st.text(alphabet='0123456789,.-+eE" xé', max_size=20), max_size=5))
def test_any_text_is_an_event_or_a_bad_line(rows: list[str]) -> None:
    bad = BadLines("x", skip=True)
    numbered = enumerate([RATINGS_HEADER, *rows], 1)
    events = list(SOURCES["ratings"].read(iter(numbered), bad))
    assert len(events) + bad.count == len(rows)


DATA = Path(os.environ.get("USERKV_DATA") or Path(__file__).parents[4] / "shared" / "data")


@pytest.mark.parametrize(
    ("file", "source", "events", "users"),
    [
        ("otto/train_sample.jsonl", "otto", 862, 20),
        ("movielens-latest-small/ratings.csv", "ratings", 100_836, 610),
    ],
)
def test_the_public_files(file: str, source: str, events: int, users: int) -> None:
    path = DATA / file
    if not path.exists():
        pytest.skip(f"no {path}; set USERKV_DATA")
    assert detect_format(path) == source
    found, bad = read_events(path, source)
    assert (len(found), len({event.user for event in found}), bad.count) == (events, users, 0)
