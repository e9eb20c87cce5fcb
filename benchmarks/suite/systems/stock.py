"""vLLM as it is: without prefix caching, and with its own (APC)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.suite.system import Prepared, Sizes, System
from benchmarks.suite.systems.arguments import STOCK, STOCK_ENVIRONMENT


class NoCache(System):
    """Every request computes its whole prompt."""

    name = "no-cache"
    title = "vLLM, no cache"

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        yield Prepared(("--no-users", "--engine-arg", "enable_prefix_caching=false"), STOCK_ENVIRONMENT)


class Apc(System):
    """vLLM's automatic prefix caching: whole blocks, least recently used out first."""

    name = "apc"
    title = "vLLM APC"

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        yield Prepared(STOCK, STOCK_ENVIRONMENT)
