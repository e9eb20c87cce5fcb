"""Settings of the pool: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``.

Sizes are a number of bytes or text such as ``"4GiB"``; see ``sizes.py``.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from userkv.core.errors import InvalidOptionError, InvalidSettingError
from userkv.core.sizes import GIB, MIB, format_size, parse_size
from userkv.core.values import seconds, switch, text, whole_number

DEFAULT_EXTENT_BYTES = 16 * MIB
DEFAULT_LOCAL_DRAM_BYTES = 1 * GIB
DEFAULT_LOCAL_SSD_BYTES = 8 * GIB

CONNECTOR = "MooncakeUserStoreConnector"
"""Name of the KV connector that these settings are for."""

BACKENDS = ("local", "mooncake")

MOONCAKE_KEYS = (
    "local_hostname",
    "metadata_server",
    "master_server_address",
    "protocol",
    "device_name",
    "global_segment_size",
    "local_buffer_size",
    "enable_ssd_offload",
    "ssd_offload_path",
    "client_server_address",
    "rpc_timeout_ms",
    "replica_num",
    "config_path",
    "metrics_address",
    "tenant_id",
)
"""Options that go to the Mooncake backend as they are, named as in ``mooncake.json``."""

LOCAL_KEYS = ("local_dir", "local_dram_bytes", "local_ssd_bytes")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How the pool behaves; :meth:`from_extra_config` checks what users write.

    Attributes:
        backend: where KV is kept: ``local`` (memory and disk of this machine) or ``mooncake`` (Mooncake Store).
        load_async: load while other requests compute; off: the step that needs the KV waits for it. Ignored with
            ``use_layerwise``, whose loads belong to the step (see :attr:`loads_async`).
        use_layerwise: one object per layer; a layer is moved while another one computes.
        layerwise_prefetch_layers: how many layers a load runs ahead, at least 1.
        lookup_rpc_port: 0 = look-ups use a Unix socket; else TCP on 127.0.0.1, one port per rank from this one on.
        weights_version: name of the weights; "" = a fingerprint of their files.
        consumer_is_to_load: whether an engine with the role ``kv_consumer`` loads.
        consumer_is_to_put: whether an engine with the role ``kv_consumer`` saves, too.
        ttl_seconds: how long what is saved may be used; 0 = for ever.
        lookup_timeout_ms: longest wait for a look-up, then the request computes its history.
        max_queued_saves: saves that wait for their transfer at most; further ones are dropped and counted.
        load_threads: loads that run at once on a worker.
        extent_bytes: largest object of one worker, in bytes; an object has at least one block.
        local_dir: directory of the local backend's SSD tier; "" = no SSD tier.
        local_dram_bytes: budget of its memory tier; 0 = none.
        local_ssd_bytes: budget of its SSD tier; 0 = none.
        mooncake: the options of ``MOONCAKE_KEYS`` that were given, unchecked.

    """

    backend: str = "local"
    load_async: bool = True
    use_layerwise: bool = False
    layerwise_prefetch_layers: int = 1
    lookup_rpc_port: int = 0
    weights_version: str = ""
    consumer_is_to_load: bool = True
    consumer_is_to_put: bool = False
    ttl_seconds: float = 0
    lookup_timeout_ms: int = 500
    max_queued_saves: int = 64
    load_threads: int = 2
    extent_bytes: int = DEFAULT_EXTENT_BYTES
    local_dir: str = ""
    local_dram_bytes: int = DEFAULT_LOCAL_DRAM_BYTES
    local_ssd_bytes: int = DEFAULT_LOCAL_SSD_BYTES
    mooncake: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def from_extra_config(cls, config: Mapping[str, Any]) -> "PoolSettings":
        """Read ``kv_connector_extra_config``.

        Raises:
            InvalidSettingError: an option does not exist, or has a value that cannot be used.

        """
        known = (*_PARSERS, *MOONCAKE_KEYS)
        for name in config:
            if name not in known:
                close = difflib.get_close_matches(str(name).lower(), known, n=1)
                advice = f"did you mean {close[0]!r}?" if close else f"it knows {', '.join(known)}"
                raise InvalidSettingError(f"kv_connector_extra_config has no option {name!r}; {advice}")
        values = {name: parse(name, config[name]) for name, parse in _PARSERS.items() if name in config}
        mooncake = {name: config[name] for name in MOONCAKE_KEYS if name in config}
        settings = cls(**values, mooncake=MappingProxyType(mooncake))
        settings._check_backend(config)
        return settings

    @property
    def loads_async(self) -> bool:
        """Whether loads run beside other requests' steps."""
        return self.load_async and not self.use_layerwise

    def loads(self, kv_role: str | None) -> bool:
        """Whether an engine with this ``kv_role`` takes KV from the pool."""
        _check_role(kv_role)
        return kv_role == "kv_both" or (kv_role == "kv_consumer" and self.consumer_is_to_load)

    def saves(self, kv_role: str | None) -> bool:
        """Whether an engine with this ``kv_role`` puts KV into the pool."""
        _check_role(kv_role)
        return kv_role in ("kv_both", "kv_producer") or self.consumer_is_to_put

    def _check_backend(self, config: Mapping[str, Any]) -> None:
        other, keys = ("mooncake", MOONCAKE_KEYS) if self.backend == "local" else ("local", LOCAL_KEYS)
        strange = next((name for name in keys if name in config), None)
        if strange is not None:
            raise InvalidOptionError(
                strange,
                f"is an option of the {other} backend, but the backend is {self.backend!r}; "
                f'remove it or set "backend": "{other}"',
            )
        if self.backend == "local" and not self.local_dram_bytes and not (self.local_dir and self.local_ssd_bytes):
            raise InvalidOptionError(
                "local_dram_bytes", "must be more than 0, since the local pool has no SSD tier (directory and size)"
            )


def _count(least: int, most: int | None = None) -> Callable[[str, Any], int]:
    return lambda name, value: whole_number(name, value, least, most)


def _extent_size(name: str, value: Any) -> int:
    size = parse_size(name, value)
    if size == 0:
        raise InvalidOptionError(name, f"must not be 0; leave it out for {format_size(DEFAULT_EXTENT_BYTES)}")
    return size


def _backend(name: str, value: Any) -> str:
    if value not in BACKENDS:
        raise InvalidOptionError(name, f"must be one of {', '.join(BACKENDS)}, not {value!r}")
    return str(value)


def _check_role(kv_role: str | None) -> None:
    if kv_role not in ("kv_producer", "kv_consumer", "kv_both"):
        raise InvalidOptionError("kv_role", f"must be kv_producer, kv_consumer or kv_both, not {kv_role!r}")


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "backend": _backend,
    "load_async": switch,
    "use_layerwise": switch,
    "layerwise_prefetch_layers": _count(1),
    "lookup_rpc_port": _count(0, 65535),
    "weights_version": text,
    "consumer_is_to_load": switch,
    "consumer_is_to_put": switch,
    "ttl_seconds": seconds,
    "lookup_timeout_ms": _count(1),
    "max_queued_saves": _count(1),
    "load_threads": _count(1),
    "extent_bytes": _extent_size,
    "local_dir": text,
    "local_dram_bytes": parse_size,
    "local_ssd_bytes": parse_size,
}
