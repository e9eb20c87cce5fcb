"""The systems that the suite compares."""

from userkv.bench.suite.system import System
from userkv.bench.suite.systems.lmcache import LMCache
from userkv.bench.suite.systems.mooncake import MooncakeStoreConnector, UserKVMooncake
from userkv.bench.suite.systems.offloading import Offloading
from userkv.bench.suite.systems.stock import Apc, NoCache
from userkv.bench.suite.systems.userkv import UserKVHbm, UserKVLayerwise, UserKVLocal

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        NoCache(),
        Apc(),
        Offloading(),
        MooncakeStoreConnector(),
        LMCache(),
        UserKVHbm(),
        UserKVLocal(),
        UserKVMooncake(),
        UserKVLayerwise(),
    )
}
"""All systems by name, in the order of tables."""
