"""What a Mooncake master says about its pool over HTTP."""

import http.client
import re
import urllib.error
import urllib.request
from typing import NamedTuple

from userkv.core.sizes import MIB
from userkv.store.backend import PoolUnavailableError, Tier, TierUsage

TIMEOUT = 0.5
_LONGEST = 4 * MIB


class MasterStatus(NamedTuple):
    """A pool as its master sees it. Sizes in bytes; an object must fit into one segment."""

    keys: int
    clients: int
    dram_used: int
    dram_budget: int
    ssd_used: int
    ssd_budget: int
    largest_segment: int

    def usage(self) -> list[TierUsage]:
        """Bytes per tier; a tier that no client lends is left out."""
        tiers = [
            TierUsage(Tier.DRAM, self.dram_used, self.dram_budget),
            TierUsage(Tier.SSD, self.ssd_used, self.ssd_budget),
        ]
        return [tier for tier in tiers if tier.used or tier.budget]


_LINE = re.compile(r"^([a-z]\S*) (\S+)$", re.MULTILINE)
_SEGMENT = "segment_total_capacity_bytes{"
_METRICS = {
    "keys": "master_key_count",
    "clients": "master_active_clients",
    "dram_used": "master_allocated_bytes",
    "dram_budget": "master_total_capacity_bytes",
    "ssd_used": "master_allocated_file_size_bytes",
    "ssd_budget": "master_total_file_capacity_bytes",
}


def ask_master(metrics_address: str, timeout: float = TIMEOUT) -> MasterStatus:
    """The status of the pool whose master has its metrics at ``host:port``.

    Raises:
        PoolUnavailableError: it does not answer, or not like a master.

    """
    url = f"http://{metrics_address}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            text = response.read(_LONGEST).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise PoolUnavailableError(f"the master's metrics at {url} cannot be read: {reason}") from error
    try:
        values = {name: float(value) for name, value in _LINE.findall(text)}
        fields = {field: int(values[name]) for field, name in _METRICS.items()}
        segments = [size for name, size in values.items() if name.startswith(_SEGMENT)]
        return MasterStatus(**fields, largest_segment=int(max(segments, default=0)))
    except (KeyError, ValueError, OverflowError) as error:
        raise PoolUnavailableError(f"{url} is not the metrics page of a Mooncake master") from error
