"""The connection to a Mooncake pool: made when there is a master, however late, and made again if it failed.

Facts about the library (0.3.13) that shape this file: ``setup`` and ``close`` hold the interpreter's lock while they
work, ``setup`` for 4.4 s per attempt without a master; its time-outs come from the environment, read at ``setup``; a
call after ``close`` crashes the process. Master restarts and network failures it survives by itself.
"""

import ctypes
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from userkv.core.errors import InvalidSettingError
from userkv.core.sizes import MIB
from userkv.store.backend import PoolUnavailableError, Region
from userkv.store.mooncake.calls import Gate
from userkv.store.mooncake.config import LEAST_SEGMENT, MooncakeConfig
from userkv.store.mooncake.errors import describe
from userkv.store.mooncake.files import FilesDirectory
from userkv.store.mooncake.master import ask_master
from userkv.store.mooncake.memory import Arena
from userkv.store.mooncake.own_memory import OwnMemory, find_own_memory, mapped

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
PROBE_SECONDS = 0.5
CLIENT_TTL_SECONDS = 11.0
"""After how long a master has forgotten a client that crashed: its default, and a second."""
CLOSE_SECONDS = 10.0
"""How long :meth:`Connection.close` waits for calls into the library. With the time-outs below, setting up takes 9 s
and all else less, unless a process is frozen; ``serving/launch_plan.py`` says why no longer.
"""
LIMITS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_LOG_LEVEL": "ERROR",
}
"""Environment of the library unless the operator has set it: a transfer from a frozen process ends after 2 to 4 s, and
connections are kept rather than made for every piece.
"""
OFFLOAD = {
    # The only one in 0.3.13 with which nothing that was accepted is lost, and replaced records stay replaced.
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(128 * MIB),  # It would take 1.25 GiB.
}
_never_closed: list[Any] = []
"""Clients with calls that did not return: destroying them would crash the process."""


class Client:
    """A connected library client and the memory that goes with it.

    Attributes:
        store: Mooncake's ``MooncakeDistributedStore``.
        arena: memory that it can transfer from and to.
        remote: whether another process does the work, which sees no memory but the arena's.
        offloads: whether objects of this pool are known to be written to files.
        own_memory: the memory that it lends to the pool, if it is known where that is.

    """

    def __init__(self, store: Any, arena: Arena, remote: bool, offloads: bool, own_memory: OwnMemory | None) -> None:
        self.store = store
        self.arena = arena
        self.remote = remote
        self.offloads = offloads
        self.own_memory = own_memory


class Connection:
    """Makes and holds the one client of a backend. Thread-safe.

    Args:
        config: where to connect.

    Raises:
        InvalidSettingError: Mooncake is not installed, or the directory for files cannot be used.

    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._gate = Gate()
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._not_before = 0.0
        self._regions: list[Region] = []
        self._memory: mmap.mmap | None = None
        self._files: FilesDirectory | None = None
        os.environ.update({name: value for name, value in LIMITS.items() if name not in os.environ})
        os.environ["MC_RPC_TIMEOUT_MS"] = str(config.rpc_timeout_ms)
        os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", str(config.rpc_timeout_ms))
        if config.enable_ssd_offload:
            os.environ.update({name: value for name, value in OFFLOAD.items() if name not in os.environ})
            self._files = FilesDirectory(Path(config.ssd_offload_path))
            if not self._files.left_tidy:
                # Files that are announced while the master still knows the crashed owner vanish together with that.
                self._not_before = time.monotonic() + CLIENT_TTL_SECONDS
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise InvalidSettingError(
                f"Mooncake cannot be imported ({error}); install userkv with the extra 'mooncake'"
            ) from error
        self._new_store = MooncakeDistributedStore

    @contextmanager
    def use(self) -> Iterator[Client]:
        """The client, which will not be closed during a ``with`` block; connects if need be.

        Raises:
            PoolUnavailableError: there is no connection, or it was closed.

        """
        with self._gate.inside():
            client = self._client
            if client is None:
                with self._lock:
                    client = self._client = self._client or self._connect()
            yield client

    def try_now(self) -> None:
        """Connect; a failure is only logged, since there may be a pool later."""
        try:
            with self.use():
                pass
        except PoolUnavailableError as error:
            logger.warning("no pool for now: %s", error)

    def register(self, regions: Sequence[Region]) -> None:
        """Announce memory now, or as soon as there is a connection; what is known already is skipped.

        Not with ``client_server_address``: the other process does not see this one's memory.

        Raises:
            PoolUnavailableError: the transport refuses it, or the connection was closed.

        """
        if self._config.client_server_address:
            return
        with self._gate.inside(), self._lock:
            for region in regions:
                if not region.nbytes or any(_within(region, known) for known in self._regions):
                    continue
                # What overlaps is part of the new region, or has been freed: the library takes no byte twice.
                stale = [known for known in self._regions if _overlap(region, known)]
                for known in stale:
                    self._regions.remove(known)
                    if self._client is not None:
                        self._client.store.unregister_buffer(known.address)
                if self._client is not None:
                    _announce(self._client.store, [region])
                self._regions.append(region)

    def close(self) -> None:
        """Wait for running calls, then disconnect. Idempotent."""
        quiet = self._gate.close(CLOSE_SECONDS)
        with self._lock:
            client, self._client = self._client, None
            if client is not None and not quiet:
                logger.warning("calls to Mooncake did not return; its client stays open until this process ends")
                _never_closed.extend((client, self._memory))
            elif client is not None:
                if self._files is not None:
                    client.store.unmount_local_disk_segment()
                client.store.close()
            if self._files is not None:
                self._files.close(tidy=quiet)
                self._files = None

    def _connect(self) -> Client:
        config = self._config
        where = config.client_server_address or config.master_server_address
        if time.monotonic() < self._not_before:
            raise PoolUnavailableError(f"no connection to Mooncake at {where}")
        self._not_before = time.monotonic() + RETRY_SECONDS
        _probe(where)
        before = mapped()
        store = self._new_store()
        if config.client_server_address:
            code = store.setup_dummy(LEAST_SEGMENT, LEAST_SEGMENT, where)  # Not used; it wants some.
        else:
            code = store.setup(
                config.local_hostname,
                config.metadata_server,
                config.global_segment_size,
                LEAST_SEGMENT,  # For calls that are not used here.
                config.protocol,
                config.device_name,
                where,
                enable_ssd_offload=config.enable_ssd_offload,
                ssd_offload_path=config.ssd_offload_path,
                tenant_id=config.tenant_id,
            )
        if code:
            raise PoolUnavailableError(
                f"Mooncake refuses to connect to {where}, {describe(code)}; its own messages on stderr say why"
            )
        arena = self._make_arena(store)
        _announce(store, self._regions)
        logger.info("connected to Mooncake at %s", where)
        lends = config.global_segment_size if not config.client_server_address else 0
        own_memory = find_own_memory(store, lends, before) if lends else None
        return Client(store, arena, bool(config.client_server_address), self._offloads(), own_memory)

    def _offloads(self) -> bool:
        if self._config.metrics_address:
            with suppress(PoolUnavailableError):
                return ask_master(self._config.metrics_address).ssd_budget > 0
        return self._config.enable_ssd_offload

    def _make_arena(self, store: Any) -> Arena:
        nbytes = self._config.local_buffer_size
        if self._config.client_server_address:
            address = store.alloc_from_mem_pool(nbytes)  # Shared with the other process; it ends with the store.
        else:
            if self._memory is None:
                self._memory = mmap.mmap(-1, nbytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if not address:
            raise PoolUnavailableError(
                f"Mooncake has no {nbytes} bytes of memory to share; set local_buffer_size lower"
            )
        _announce(store, [Region(address, nbytes)])
        return Arena(address, nbytes)


def _overlap(one: Region, other: Region) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def _within(one: Region, other: Region) -> bool:
    return other.address <= one.address and one.address + one.nbytes <= other.address + other.nbytes


def _announce(store: Any, regions: Iterable[Region]) -> None:
    for address, nbytes in regions:
        code = store.register_buffer(address, nbytes)
        if code:
            raise PoolUnavailableError(f"Mooncake cannot register {nbytes} bytes of memory: {describe(code)}")


def _probe(where: str) -> None:
    """Fail fast if nobody listens: ``setup`` would hold the interpreter's lock for seconds."""
    if "://" in where:
        return
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except OSError as error:
        raise PoolUnavailableError(f"nobody answers at {where} ({error})") from error
