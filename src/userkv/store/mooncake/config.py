"""Settings of the Mooncake backend: where the master is, and what this process gives to the pool.

From the lowest precedence to the highest: ``mooncake.json``, which other tools read, too, so that keys that are not
known here are left alone; the environment variables that Mooncake's own Python package reads; and
``kv_connector_extra_config``. Without any of them, the pool counts that ``userkv pool start`` started for this user on
this machine.

Sizes mean what they mean in all of UserKV (``core/sizes.py``): ``"4GB"`` is 4 * 10**9 bytes, ``"4GiB"`` 4 * 2**30.
Mooncake's own Python package reads ``"4GB"`` in the same file as 4 * 2**30 bytes. ``"4GiB"`` and a number of bytes mean
the same to both.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from userkv.core import options, values
from userkv.core.errors import InvalidOptionError, InvalidSettingError
from userkv.core.sizes import GIB, MIB, format_size, parse_size

CONFIG_PATH = "MOONCAKE_CONFIG_PATH"
CONFIG_NAME = "mooncake.json"
HOT_CACHE = "MC_STORE_LOCAL_HOT_CACHE_SIZE"
LEAST_SEGMENT = 16 * MIB
"""The smallest piece of memory that Mooncake can share."""
_LEAST = f"{format_size(LEAST_SEGMENT)} ({LEAST_SEGMENT} bytes)"
DEFAULT_SEGMENT_SIZE = 1 * GIB
DEFAULT_BUFFER_SIZE = 128 * MIB

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
        "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
        "MOONCAKE_MASTER": "master_server_address",
        "MOONCAKE_PROTOCOL": "protocol",
        "MOONCAKE_DEVICE": "device_name",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "local_buffer_size",
        "MOONCAKE_OFFLOAD_ENABLED": "enable_ssd_offload",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "ssd_offload_path",
        "MOONCAKE_TENANT_ID": "tenant_id",
        "MC_RPC_TIMEOUT_MS": "rpc_timeout_ms",
    }
)
"""Environment variables and the setting that each of them is."""


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """How this process takes part in a Mooncake pool.

    Attributes:
        master_server_address: ``host:port`` of the master, or the connection string of several (``etcd://...``).
        local_hostname: this machine, as the machines that read its memory call it.
        metadata_server: how transfer engines find each other; P2PHANDSHAKE needs no server.
        protocol: of the transfers: tcp, rdma and what else this build of Mooncake has.
        device_name: network devices for rdma, separated by commas.
        global_segment_size: bytes of memory lent to the pool; 0 = none.
        local_buffer_size: bytes of memory for transfers that cannot use the engine's own: at least 16 MiB, and room
            for the extents that are moved at once.
        enable_ssd_offload: whether what leaves the lent memory is kept in files.
        ssd_offload_path: absolute directory of these files, for this process alone.
        tenant_id: of a master with tenants.
        client_server_address: ``host:port`` of a ``mooncake_client`` of this machine, which then does everything for
            this process and keeps the pool's memory when this process ends; "" = this process is a client itself.
        rpc_timeout_ms: how long the master may take to answer.
        replica_num: copies of every object in memory.
        metrics_address: ``host:port`` of the master's metrics; "" = nobody asks how full the pool is.

    """

    master_server_address: str
    local_hostname: str = "127.0.0.1"
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    global_segment_size: int = DEFAULT_SEGMENT_SIZE
    local_buffer_size: int = DEFAULT_BUFFER_SIZE
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    client_server_address: str = ""
    rpc_timeout_ms: int = 1000
    replica_num: int = 1
    metrics_address: str = ""

    def __post_init__(self) -> None:
        if 0 < self.global_segment_size < LEAST_SEGMENT:
            raise InvalidOptionError(
                "global_segment_size", f"is {self.global_segment_size} bytes; lend at least {_LEAST} to the pool, or 0"
            )
        if self.local_buffer_size < LEAST_SEGMENT:
            raise InvalidOptionError(
                "local_buffer_size", f"is {self.local_buffer_size} bytes; it must be at least {_LEAST}"
            )
        if self.enable_ssd_offload and not (self.ssd_offload_path and self.global_segment_size):
            raise InvalidOptionError(
                "enable_ssd_offload", "needs ssd_offload_path, a directory, and memory to offload (global_segment_size)"
            )

    @property
    def staged(self) -> bool:
        """Whether KV goes by way of the transfer buffer, one copy more.

        Because the process that does the work does not see the engine's memory; or because over TCP one large piece
        is faster than many small ones, by more than the copy costs.
        """
        return bool(self.client_server_address) or (self.protocol == "tcp" and not self.global_segment_size)

    @classmethod
    def load(
        cls, extra: Mapping[str, Any], rank: int | None = None, environ: Mapping[str, str] = os.environ
    ) -> "MooncakeConfig":
        """Read the settings from everywhere.

        Args:
            extra: options of ``kv_connector_extra_config``; ``config_path`` names another ``mooncake.json``.
            rank: which of several workers this is: each keeps its files in a directory of its own.
            environ: the environment.

        Raises:
            InvalidSettingError: there is no master, or a setting cannot be used.

        """
        found = dict(_from_file(extra, environ))
        found |= {
            setting: _parse(setting, variable, environ[variable])
            for variable, setting in ENVIRONMENT.items()
            if environ.get(variable)
        }
        found |= {name: _parse(name, name, value) for name, value in extra.items() if name in _PARSERS}
        if environ.get(HOT_CACHE, "0") != "0":
            raise InvalidSettingError(f"unset {HOT_CACHE}: Mooncake's hot cache serves users' old records")
        if found.get("client_server_address"):
            found.setdefault("master_server_address", "")
        elif not found.get("master_server_address"):
            raise InvalidSettingError(
                "Mooncake's master is not known; start one with `userkv pool start`, or set MOONCAKE_MASTER or "
                f"master_server_address to its host:port, or {CONFIG_PATH} to a mooncake.json"
            )
        elif "local_hostname" not in found and not _is_local(found["master_server_address"]):
            raise InvalidSettingError(
                f"the master is at {found['master_server_address']}; set local_hostname (or MOONCAKE_LOCAL_HOSTNAME) "
                "to this machine's own address, under which the other machines reach it"
            )
        if rank is not None and found.get("ssd_offload_path"):
            found["ssd_offload_path"] = str(Path(found["ssd_offload_path"]) / f"rank-{rank}")
        return cls(**found)


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where ``userkv pool start`` keeps what belongs to the running pool, unless it is told otherwise."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "userkv" if base else Path(tempfile.gettempdir()) / f"userkv-{os.getuid()}"


def is_private(directory: Path) -> bool:
    """Whether only this user can have written what is in a directory."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _from_file(extra: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    named = extra.get("config_path") or environ.get(CONFIG_PATH)
    if not named:
        directory = runtime_directory(environ)
        named = directory / CONFIG_NAME
        if environ.get("MOONCAKE_MASTER") or "master_server_address" in extra or not is_private(directory):
            return {}
        if not named.exists():
            return {}
    path = Path(str(named)).expanduser()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettingError(
            f"cannot read {path}: {error.strerror}; {CONFIG_PATH} or config_path names it"
        ) from error
    except ValueError as error:
        raise InvalidSettingError(f"{path} is not JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise InvalidSettingError(f"{path} must hold a JSON object, that is, start with {{")
    return {
        name: _parse(name, f"{name} in {path}", value)
        for name, value in content.items()
        if name in _PARSERS and value is not None
    }


def _parse(setting: str, source: str, value: Any) -> Any:
    return _PARSERS[setting](source, value)


def _is_local(address: str) -> bool:
    host = address.rsplit(":", 1)[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _text(source: str, value: Any) -> str:
    return values.text(source, value).strip()


def _host(source: str, value: Any) -> str:
    text = _text(source, value)
    if not text:
        raise InvalidOptionError(source, "must not be empty")
    return text


def _address(source: str, value: Any) -> str:
    text = _text(source, value)
    host, separator, port = text.rpartition(":")
    if text and "://" not in text and not (separator and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidOptionError(source, f"must be host:port, such as 10.0.0.5:50051, not {value!r}")
    return text


def _protocol(source: str, value: Any) -> str:
    return _host(source, value).lower()


def _switch(source: str, value: Any) -> bool:
    return value != "" and options.switch(source, str(value))


def _number(most: int) -> Callable[[str, Any], int]:
    return lambda source, value: options.whole_number(source, str(value), 1, most)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "master_server_address": _address,
    "local_hostname": _host,
    "metadata_server": _host,
    "protocol": _protocol,
    "device_name": _text,
    "global_segment_size": parse_size,
    "local_buffer_size": parse_size,
    "enable_ssd_offload": _switch,
    "ssd_offload_path": _text,
    "tenant_id": _text,
    "client_server_address": _address,
    "rpc_timeout_ms": _number(60_000),
    "replica_num": _number(8),
    "metrics_address": _address,
}
