"""Real Mooncake servers on loopback for tests: a master, processes that lend memory, and a client process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import mooncake
import psutil

from tests.support.backends import closing
from userkv.core.sizes import MIB
from userkv.store.backend import PoolBackend, PoolUnavailableError
from userkv.store.mooncake.backend import MooncakeBackend
from userkv.store.mooncake.config import MooncakeConfig
from userkv.store.mooncake.master import ask_master

BINARIES = Path(mooncake.__path__[0])
PATIENCE = 20.0
LEASE_MS = 300


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A process that can be frozen, killed and started again. Ends with the ``with`` block."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self._command = command
        self._env = os.environ | (env or {})
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._env
        )

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        """Let it end by itself: it reads its standard input until the end."""
        self.process.communicate(timeout=PATIENCE)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Master(Server):
    """A master, by default with leases and time-outs that do not slow tests down."""

    def __init__(self, *flags: str, lease_ms: int = LEASE_MS) -> None:
        self.port = free_port()
        self.metrics_port = free_port()
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "default_kv_lease_ttl": lease_ms,
            "client_ttl": 3,
        }
        super().__init__([str(BINARIES / "mooncake_master"), *(f"--{n}={v}" for n, v in options.items()), *flags])

    def start(self) -> None:
        super().start()
        wait_for(lambda: can_connect(self.port) and can_connect(self.metrics_port))

    def config(self, segment: int = 64 * MIB) -> MooncakeConfig:
        """Settings of a process of this machine."""
        return MooncakeConfig(
            master_server_address=f"127.0.0.1:{self.port}",
            metrics_address=f"127.0.0.1:{self.metrics_port}",
            global_segment_size=segment,
        )

    def open(self, segment: int = 64 * MIB) -> MooncakeBackend:
        return MooncakeBackend(self.config(segment))


def owner(master: Master, segment: int, ssd: Path | None = None) -> Server:
    """A process that lends memory to the pool and does nothing else."""
    config = replace(
        master.config(segment), enable_ssd_offload=ssd is not None, ssd_offload_path="" if ssd is None else str(ssd)
    )
    code = (
        "import select, sys; from contextlib import suppress; from userkv.store.backend import PoolUnavailableError\n"
        "from userkv.store.mooncake.backend import MooncakeBackend\n"
        "from userkv.store.mooncake.config import MooncakeConfig\n"
        f"backend = MooncakeBackend({config!r})\n"
        "while not select.select([sys.stdin], [], [], 0.5)[0]:\n"
        "    with suppress(PoolUnavailableError): backend.locate('u', ['k'])  # Connects, if it is not yet.\n"
        "backend.close()"
    )
    server = _joined(master, lambda: Server([sys.executable, "-c", code]))
    # What is put before the files are ready never gets into one.
    wait_for(lambda: ssd is None or ask_master(f"127.0.0.1:{master.metrics_port}").ssd_budget > 0)
    return server


def client_server(master: Master, segment: int) -> tuple[Server, str]:
    """Mooncake's own client process for a node, and where it listens."""
    port = free_port()
    options = {
        "host": "127.0.0.1",
        "port": port,
        "master_server_address": f"127.0.0.1:{master.port}",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": f"{segment // MIB}MB",
    }
    command = [str(BINARIES / "mooncake_client"), *(f"--{name}={value}" for name, value in options.items())]
    server = _joined(master, lambda: Server(command))
    wait_for(lambda: can_connect(port))
    return server, f"127.0.0.1:{port}"


def _joined(master: Master, start: Callable[[], Server]) -> Server:
    fewest = ask_master(f"127.0.0.1:{master.metrics_port}").clients
    server = start()

    def joined() -> bool:
        nonlocal fewest
        now = clients(master)
        fewest = min(fewest, now)  # One that was killed may still be counted at first.
        return now > fewest

    wait_for(joined)
    return server


def clients(master: Master) -> int:
    try:
        return ask_master(f"127.0.0.1:{master.metrics_port}").clients
    except PoolUnavailableError:
        return 0


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
    except OSError:
        return False
    return True


def wait_for(done: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@contextmanager
def own_memory(directory: Path) -> Iterator[PoolBackend]:
    """A backend that lends the pool's memory itself."""
    with Master() as master, closing(master.open(16 * MIB)) as backend:
        yield backend


@contextmanager
def others_memory(directory: Path) -> Iterator[PoolBackend]:
    """A backend that lends nothing: all memory belongs to another process."""
    with Master() as master, owner(master, 16 * MIB), closing(master.open(0)) as backend:
        yield backend


@contextmanager
def client_process(directory: Path) -> Iterator[PoolBackend]:
    """A backend that leaves everything to Mooncake's client process."""
    with ExitStack() as stack:
        master = stack.enter_context(Master())
        server, address = client_server(master, 16 * MIB)
        stack.enter_context(server)
        config = replace(master.config(0), client_server_address=address)
        yield stack.enter_context(closing(MooncakeBackend(config)))
