"""The contract of the systems that the suite compares: how each is started, with its best settings, for one run."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from userkv.core.errors import UserKVError


class SystemMissingError(UserKVError):
    """This machine cannot run a system; says in one sentence what is missing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all systems of a run have to live with.

    Attributes:
        block_size: tokens per KV block.
        hbm_blocks: KV blocks in the engine, vLLM's ``num_gpu_blocks_override``.
        pool_bytes: the pool's memory, for systems that have one.
        token_bytes: KV of one token in all layers.
        max_model_len: longest prompt and output, tokens.

    """

    block_size: int
    hbm_blocks: int
    pool_bytes: int
    token_bytes: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """What a pool says of itself at the end of a run; ``None`` where the system does not tell.

    Attributes:
        put_bytes: KV bytes written to it during the run.
        got_bytes: KV bytes read from it during the run.
        objects: objects in it.
        used_bytes: bytes in it.

    """

    put_bytes: int | None = None
    got_bytes: int | None = None
    objects: int | None = None
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A system that is ready for one run of ``userkv replay --offline``.

    Attributes:
        options: further options of ``userkv replay``.
        env: environment variables, added to the suite's own.
        python: interpreter to run it with: a peer's virtual environment may be another one than ours.
        server_pids: processes that were started beside the engine; their CPU time counts, too.
        metrics_pages: their Prometheus pages, which the replay reads while the engine, whose memory may be the pool,
            still runs.
        counters: what the replay's JSON report, with ``engine_counters`` and ``page_counters``, says of the pool.

    """

    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    server_pids: Sequence[int] = ()
    metrics_pages: Sequence[str] = ()
    counters: Callable[[Mapping[str, Any]], PoolCounters] = lambda report: PoolCounters()


class System(ABC):
    """One system. Stateless: the same one may be prepared again and again, with an empty pool each time.

    Attributes:
        name: for options and JSON, such as ``mooncake-store-connector``.
        title: for tables and plots.

    """

    name: str
    title: str

    @abstractmethod
    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        """Start what the system needs beside the engine, in an empty directory of its own, and stop it at the end.

        Raises:
            SystemMissingError: this machine cannot run it.

        """
        yield Prepared()
