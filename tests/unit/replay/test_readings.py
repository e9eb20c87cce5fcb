"""CPU time and metrics of a run."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from userkv.core.errors import InvalidSettingError
from userkv.replay.readings import Meter, Readings, counters_since, cpu_seconds
from userkv.replay.target import Outcome


def parse(page: str) -> list[Metric]:
    return list(text_string_to_metric_families(page))


class FakeTarget:
    """Each request lets it show one more of its pages; the last one stays."""

    def __init__(self, *pages: str | None) -> None:
        self._pages = list(pages)
        self.sent: list[list[int]] = []

    async def start(self) -> None:
        pass

    async def send(self, prompt_token_ids: list[int], user_id: str | None, history_len: int) -> Outcome:
        assert (user_id, history_len) == (None, 0)
        self.sent.append(prompt_token_ids)
        del self._pages[: len(self._pages) > 1]
        return Outcome(True, None, len(prompt_token_ids), 0, 0.0, 0.0, None)

    async def metrics(self) -> list[Metric] | None:
        return None if self._pages[0] is None else parse(self._pages[0])

    async def close(self) -> None:
        pass


@contextmanager
def page_server(pages: Sequence[str]) -> Iterator[str]:
    """Answers with one page after the other."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(left.pop(0).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measure(target: FakeTarget, pages: Sequence[str] = ()) -> Readings:
    """Readings around a run of one request."""

    async def run() -> Readings:
        meter = Meter(target, pages=pages)
        await meter.begin()
        await target.send([1], None, 0)
        return await meter.end([7])

    return asyncio.run(run())


BURN = """
import sys, time
while time.process_time() < 0.3: pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("named", [True, False], ids=["another process", "a child"])
def test_cpu_time_of_other_processes(named: bool) -> None:
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        burned = float(child.stdout.readline())
        # However often it is named.
        while_it_runs = cpu_seconds([child.pid] * 2 if named else []) - before
        child.communicate()
    when_it_is_gone = cpu_seconds() - before
    # The system counts in ticks of 10 ms.
    assert burned - 0.05 <= while_it_runs < burned + 0.25
    assert burned - 0.05 <= when_it_is_gone < burned + 0.25


def test_the_cpu_time_of_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    with pytest.raises(InvalidSettingError, match="--cpu-of"):
        cpu_seconds([gone.pid])


VALUES = st.integers(0, 1000)


@given(before=st.lists(VALUES, min_size=2, max_size=2), grown=st.lists(VALUES, min_size=2, max_size=2), gauge=VALUES)
def test_growth_of_counters_and_last_values_of_gauges(before: list[int], grown: list[int], gauge: int) -> None:
    def page(values: list[int], level: int) -> str:
        lines = ["# TYPE level_count gauge", f"level_count {level}"]
        for engine in (0, 1):
            labels = f'{{engine="{engine}",model_name="m",tier="dram"}}'
            lines.append(f"a_tokens_total{labels} {values[engine]}")
        lines.append(f'a_seconds_bucket{{le="+Inf"}} {values[0]}')
        return "\n".join([*lines, ""])

    after = [one + more for one, more in zip(before, grown, strict=True)]
    found = counters_since(parse(page(before, 5)), parse(page(after, gauge)))
    assert found == {'a_tokens_total{tier="dram"}': sum(grown), "level_count": gauge}


def test_counters_that_began_anew() -> None:
    assert counters_since(parse("a_total 5\n"), parse("a_total 4\n")) is None
    assert counters_since([], parse("a_total 4\n")) == {"a_total": 4}


def test_further_steps_until_all_is_counted() -> None:
    pages = [f"userkv_a_total {n}\nother_total {n}\n" for n in (1, 4, 6, 7, 7)]
    target = FakeTarget(*pages)
    readings = measure(target)
    assert readings.engine_counters == {"userkv_a_total": 6}
    assert target.sent == [[1], [7], [7], [7]]
    assert readings.cpu_seconds is not None


@pytest.mark.parametrize("page", ["", "vllm:prompt_tokens_total 9\n", None], ids=["empty", "plain vLLM", "none"])
def test_an_engine_that_does_not_count_is_left_alone(page: str | None) -> None:
    target = FakeTarget("" if page is not None else None, page)
    readings = measure(target)
    assert readings.engine_counters == (None if page is None else {})
    assert readings.tiers is None
    assert target.sent == [[1]]


def test_other_pages() -> None:
    with page_server(["master_put_total 3\n", "master_put_total 10\n"]) as page:
        readings = measure(FakeTarget(""), [page])
    assert readings.page_counters == {page: {"master_put_total": 7}}


def test_a_page_that_is_gone_at_the_end() -> None:
    with page_server(["a_total 3\n", "<html> no metrics"]) as page:
        readings = measure(FakeTarget(""), [page])
    assert readings.page_counters == {page: None}


def test_a_page_that_is_not_there() -> None:
    with page_server([]) as page:
        pass
    with pytest.raises(InvalidSettingError, match="--metrics"):
        measure(FakeTarget(""), [page])
