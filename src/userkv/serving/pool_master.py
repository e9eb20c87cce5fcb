"""The Mooncake master that ``userkv pool`` runs on this machine: its process, and the files that describe it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from userkv.core.errors import InvalidSettingError
from userkv.core.sizes import format_size
from userkv.store.mooncake.config import CONFIG_NAME, DEFAULT_BUFFER_SIZE, DEFAULT_SEGMENT_SIZE, is_private

STATE_NAME = "pool.json"
LOG_NAME = "master.log"
START_SECONDS = 15.0
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Pool:
    """A master that was started here.

    Attributes:
        pid: of the process.
        started: when it began, unix seconds; tells it from another process that got its pid later.
        host: address that it listens on.
        port: of the master.
        metrics_port: of metrics and administration.
        ssd_directory: where clients of this machine keep files; "" = no SSD tier.

    """

    pid: int
    started: float
    host: str
    port: int
    metrics_port: int
    ssd_directory: str

    @property
    def address(self) -> str:
        """Where clients of this machine find the master."""
        return f"{self._reachable}:{self.port}"

    @property
    def metrics_address(self) -> str:
        """Where this machine finds its metrics."""
        return f"{self._reachable}:{self.metrics_port}"

    @property
    def _reachable(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def process(self) -> psutil.Process | None:
        """The process, if it still runs."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def client_settings(self) -> dict[str, Any]:
        """What goes into ``mooncake.json``."""
        settings: dict[str, Any] = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.address,
            "metrics_address": self.metrics_address,
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": format_size(DEFAULT_SEGMENT_SIZE).replace(" ", ""),
            "local_buffer_size": format_size(DEFAULT_BUFFER_SIZE).replace(" ", ""),
        }
        if self.host in ("127.0.0.1", "localhost"):
            settings["local_hostname"] = "127.0.0.1"
        if self.ssd_directory:
            settings |= {"enable_ssd_offload": True, "ssd_offload_path": self.ssd_directory}
        return settings


def read_pool(directory: Path) -> Pool | None:
    """The pool that was started with this directory, running or not."""
    try:
        return Pool(**json.loads((directory / STATE_NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InvalidSettingError(f"{directory / STATE_NAME} cannot be read ({error}); delete it") from error


def start_master(directory: Path, host: str, port: int, metrics_port: int, ssd_directory: str) -> Pool:
    """Start a master, wait until it serves, and write down where it is.

    Args:
        directory: for its files; made if need be, for this user alone.
        host: address to listen on.
        port: of the master; 0 = any that is free.
        metrics_port: of metrics and administration; 0 = any that is free.
        ssd_directory: where clients of this machine keep files; "" = no SSD tier.

    Raises:
        InvalidSettingError: it cannot start like this.

    """
    if ":" in host:
        raise InvalidSettingError(f"--host {host} is an IPv6 address; give an IPv4 address or a name")
    _prepare(directory)
    running = read_pool(directory)
    if running is not None and running.process() is not None:
        raise InvalidSettingError(
            f"a pool runs already, with the master at {running.address} (pid {running.pid}); "
            "stop it with `userkv pool stop`, or give this one another --dir"
        )
    port, metrics_port = _free_ports(host, port, metrics_port)
    log = directory / LOG_NAME
    with log.open("wb") as output:
        child = subprocess.Popen(
            _command(host, port, metrics_port, bool(ssd_directory)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = psutil.Process(child.pid).create_time()
    pool = Pool(child.pid, started, host, port, metrics_port, ssd_directory)
    try:
        _wait_until_it_serves(pool, child, log)
        _write(directory / CONFIG_NAME, pool.client_settings())
        _write(directory / STATE_NAME, asdict(pool))
    except BaseException:
        child.kill()
        child.wait()
        raise
    return pool


def stop_master(directory: Path, pool: Pool) -> bool:
    """Stop a master and remove the files that describe it; returns whether it was running."""
    process = pool.process()
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS)
    for name in (STATE_NAME, CONFIG_NAME):
        (directory / name).unlink(missing_ok=True)
    return process is not None


def _command(host: str, port: int, metrics_port: int, offload: bool) -> list[str]:
    package = importlib.util.find_spec("mooncake")
    if package is None or not package.submodule_search_locations:
        raise InvalidSettingError("Mooncake is not installed; install userkv with the extra 'mooncake'")
    return [
        str(Path(package.submodule_search_locations[0]) / "mooncake_master"),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        # It would listen on all addresses whatever it is told; clients find each other without it.
        "--enable_http_metadata_server=false",
        # Long enough for any transfer; what is leased can be neither evicted nor removed.
        "--default_kv_lease_ttl=5000",
        # How long objects of a machine that is gone are still promised.
        "--client_ttl=5",
        # At once rather than when memory is needed: puts would wait for the disk, and a restart lose what is in memory.
        f"--enable_offload={str(offload).lower()}",
        "--offload_on_evict=false",
    ]


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettingError(f"--dir {directory} cannot be made: {error.strerror}") from error
    if not is_private(directory) or not os.access(directory, os.W_OK):
        raise InvalidSettingError(f"others can write to {directory}, or you cannot; choose another --dir")


def _free_ports(host: str, port: int, metrics_port: int) -> tuple[int, int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for option, wanted in (("--port", port), ("--metrics-port", metrics_port)):
            try:
                family = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0][0]
                listener = stack.enter_context(socket.socket(family))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, wanted))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or error
                raise InvalidSettingError(
                    f"cannot listen on {host}:{wanted}: {reason}; choose another {option}, or --host"
                ) from error
            ports.append(int(listener.getsockname()[1]))
    return ports[0], ports[1]


def _wait_until_it_serves(pool: Pool, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if child.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
            raise InvalidSettingError(f"the master ended at once; its last words in {log}: {lines[-1]}")
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(f"http://{pool.metrics_address}/health", timeout=1) as response:
                serves = json.load(response).get("service_ready")
            if serves:
                socket.create_connection((pool._reachable, pool.port), 1).close()
                return
        if time.monotonic() > deadline:
            raise InvalidSettingError(f"the master does not answer after {START_SECONDS:g} s; see {log}")
        time.sleep(0.05)


def _write(path: Path, content: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
