"""LMCache: its multiprocess server beside an engine in a virtual environment of its own, over shared memory."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.suite.system import PoolCounters, Prepared, Sizes, System, SystemMissingError
from benchmarks.suite.systems.arguments import LOOPBACK, STOCK, STOCK_ENVIRONMENT, connector, total

CHECKOUT = Path(__file__).resolve().parents[3]

SOURCE = CHECKOUT / "src"
"""Where the package ``userkv`` lies: it is not installed where LMCache is."""

VENV = CHECKOUT / ".venv-peers" / "lmcache"
"""Made by ``make bench-peers``."""

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_ENVIRONMENT = {
    **STOCK_ENVIRONMENT,
    "PYTHONHASHSEED": "0",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
}


class LMCache(System):
    """One object per block; the pool's memory belongs to the server, which copies from and to the engine's."""

    name = "lmcache"
    title = "LMCache"

    @contextmanager
    def prepare(self, sizes: Sizes, directory: Path) -> Iterator[Prepared]:
        python = VENV / "bin" / "python"
        if not python.exists():
            raise SystemMissingError("LMCache is not installed beside this package; run `make bench-peers`.")
        port, http_port = _free_ports()
        with _server(sizes, port, http_port, directory / "server.log") as process:
            option = connector(
                "LMCacheMPConnector",
                **{
                    "lmcache.mp.host": f"tcp://{LOOPBACK}",
                    "lmcache.mp.port": port,
                    "lmcache.mp.mp_transfer_mode": "lmcache_driven",
                },
            )
            page = _page(http_port)
            block_bytes = sizes.block_size * sizes.token_bytes
            yield Prepared(
                (*STOCK, *option),
                {**_ENVIRONMENT, "PYTHONPATH": str(SOURCE)},
                python,
                server_pids=(process.pid,),
                metrics_pages=(page,),
                counters=lambda report: _counters(report["page_counters"][page], block_bytes),
            )


@contextmanager
def _server(sizes: Sizes, port: int, http_port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(VENV / "bin" / "lmcache"), "server"]
    for name, value in {
        "host": LOOPBACK,
        "port": port,
        "http-host": LOOPBACK,
        "http-port": http_port,
        "chunk-size": sizes.block_size,
        "supported-transfer-mode": "auto",
        "l1-size-gb": sizes.pool_bytes / 2**30,
        "eviction-policy": "LRU",
        # Its defaults, 0.8 and 0.2, would leave up to two fifths of a small pool empty.
        "eviction-trigger-watermark": 0.95,
        "eviction-ratio": 0.05,
    }.items():
        command += [f"--{name}", str(value)]
    command.append("--no-l1-use-lazy")  # All memory is there, and touched, before the first request.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _ENVIRONMENT
        )
    try:
        _wait_until_it_serves(process, http_port, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_serves(process: subprocess.Popen[bytes], http_port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(_page(http_port), timeout=1):
                return
        except (OSError, urllib.error.URLError):
            if process.poll() is not None or time.monotonic() > deadline:
                words = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-300:]
                raise SystemMissingError(f"LMCache's server does not start; its last words: {words}") from None
        time.sleep(0.1)


def _page(http_port: int) -> str:
    return f"http://{LOOPBACK}:{http_port}/metrics"


def _free_ports() -> tuple[int, int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(2)]
        first, second = (int(one.getsockname()[1]) for one in sockets)
        return first, second


def _counters(counted: Mapping[str, float] | None, block_bytes: int) -> PoolCounters:
    """The server counts chunks, which are blocks here, and the memory that they take."""

    def size(name: str) -> int | None:
        chunks = total(counted, name)
        return None if chunks is None else chunks * block_bytes

    used = total(counted, "lmcache_mp_l1_memory_usage_bytes")
    return PoolCounters(
        put_bytes=size("lmcache_mp_l1_write_chunks_total"),
        got_bytes=size("lmcache_mp_num_chunks_loaded_total"),
        objects=None if used is None else used // block_bytes,
        used_bytes=used,
    )
