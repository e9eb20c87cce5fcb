"""What a run costs and what servers count meanwhile: CPU time and Prometheus metrics, read before and after."""

from __future__ import annotations

import asyncio
import http.client
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from userkv.core.errors import InvalidSettingError
from userkv.replay.target import Target
from userkv.replay.tiers import Tiers, read_tiers

ENGINE_PREFIXES = ("userkv_", "vllm:kv_offload_", "vllm:mooncake_store_")
"""How the names of the engine's metrics begin that tell what a KV cache outside of the engine does."""

_MOST_STEPS = 10
_PAUSE_SECONDS = 0.1
_PAGE_SECONDS = 5.0
_LONGEST_PAGE = 4 << 20
_LEFT_OUT = ("_bucket", "_created")
_GROWING = ("_total", "_sum", "_count")
_NOT_COUNTED = ("model_name", "engine")
"""Labels over whose values counts are added up."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What a run has changed.

    tiers: where history tokens came from. cpu_seconds: user and system time. engine_counters: the engine's own
    metrics. page_counters: those of other pages, by address. Counters are what they have grown by, gauges what they
    were at the end; None: the figures cannot be told.
    """

    tiers: Tiers | None = None
    cpu_seconds: float | None = None
    engine_counters: Mapping[str, float] | None = None
    page_counters: Mapping[str, Mapping[str, float] | None] = field(default_factory=dict)


NOTHING_READ = Readings()


class Meter:
    """Reads before and after a run. Use: ``await begin()``, the run, ``await end()``; not for several runs at once.

    target: whose metrics are the engine's. pids: processes whose CPU time counts beside that of this process; the
    descendants of all of them count, too. pages: addresses of further metrics pages.
    """

    def __init__(self, target: Target, pids: Sequence[int] = (), pages: Sequence[str] = ()) -> None:
        self._target = target
        self._pids = tuple(pids)
        self._pages = tuple(pages)
        self._cpu = 0.0
        self._engine: list[Metric] | None = None
        self._before: dict[str, list[Metric]] = {}

    async def begin(self) -> None:
        """Takes the first reading. Raises InvalidSettingError if a process or a page is not there."""
        for page in self._pages:
            try:
                self._before[page] = await _read_page(page)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise InvalidSettingError(
                    f"There are no metrics at {page} ({error}); correct or remove --metrics."
                ) from error
        self._engine = await self._target.metrics()
        self._cpu = cpu_seconds(self._pids)

    async def end(self, step: Sequence[int]) -> Readings:
        """Takes the second reading. ``step``: tokens of a throw-away request, if any are needed."""
        cpu = cpu_seconds(self._pids) - self._cpu
        after = await self._target.metrics()
        # Figures travel with the engine's steps, and what is put into a pool may be on its way yet: further steps bring
        # what the last ones have left behind. An engine that does not count is left alone.
        for _ in range(_MOST_STEPS if any((self._since(after) or {}).values()) else 0):
            seen = self._since(after)
            await self._target.send(list(step), None, 0)
            await asyncio.sleep(_PAUSE_SECONDS)
            after = await self._target.metrics()
            if self._since(after) == seen:
                break
        pages = {page: await self._page_since(page) for page in self._pages}
        if self._engine is None or after is None:
            return Readings(None, cpu, None, pages)
        return Readings(read_tiers(after).since(read_tiers(self._engine)), cpu, self._since(after), pages)

    def _since(self, after: list[Metric] | None) -> dict[str, float] | None:
        if self._engine is None or after is None:
            return None
        return counters_since(_engine_metrics(self._engine), _engine_metrics(after))

    async def _page_since(self, page: str) -> dict[str, float] | None:
        try:
            return counters_since(self._before[page], await _read_page(page))
        except (OSError, ValueError, http.client.HTTPException):
            return None  # The server has gone; the run's other figures are as good as ever.


def cpu_seconds(pids: Iterable[int] = ()) -> float:
    """User and system time, so far, of this process, of others and of all their descendants.

    Children that have ended are counted as far as somebody has waited for them.
    Raises InvalidSettingError if one of the processes is not there or belongs to somebody else.
    """
    processes: dict[int, psutil.Process] = {}
    try:
        for root in (psutil.Process(), *(psutil.Process(pid) for pid in pids)):
            root.cpu_times()  # Of this one it must be known.
            processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
    except psutil.Error as error:
        raise InvalidSettingError(f"The CPU time of a process cannot be read ({error}); correct --cpu-of.") from error
    return sum(_cpu_of(process) for process in processes.values())


def counters_since(before: Iterable[Metric], after: Iterable[Metric]) -> dict[str, float] | None:
    """Growth of counters and sums, and the last values of gauges, by ``name{label="value"}``, over all engines.

    None if a counter has become less: the server was restarted.
    """
    old, _ = _samples(before)
    new, gauges = _samples(after)
    grown = {name: value - old.get(name, 0.0) for name, value in new.items()}
    return None if min(grown.values(), default=0.0) < 0 else grown | gauges


def _samples(families: Iterable[Metric]) -> tuple[dict[str, float], dict[str, float]]:
    """(what only grows, gauges)."""
    growing: dict[str, float] = {}
    gauges: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name.endswith(_LEFT_OUT):
                continue
            counts = family.type != "gauge" and sample.name.endswith(_GROWING)
            labels = [f'{name}="{value}"' for name, value in sorted(sample.labels.items()) if name not in _NOT_COUNTED]
            name = sample.name + (f"{{{','.join(labels)}}}" if labels else "")
            found = growing if counts else gauges
            found[name] = found.get(name, 0.0) + sample.value
    return growing, gauges


def _engine_metrics(families: Iterable[Metric]) -> Iterable[Metric]:
    return (family for family in families if family.name.startswith(ENGINE_PREFIXES))


async def _read_page(address: str) -> list[Metric]:
    def read() -> str:
        with urllib.request.urlopen(address, timeout=_PAGE_SECONDS) as response:
            text: str = response.read(_LONGEST_PAGE).decode("utf-8", "replace")
            return text

    return list(text_string_to_metric_families(await asyncio.to_thread(read)))


def _cpu_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # It has ended since it was found.
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
