"""The systems that the suite compares."""

from benchmarks.suite.system import System
from benchmarks.suite.systems.lmcache import LMCache
from benchmarks.suite.systems.mooncake import MooncakeStoreConnector, UserKVMooncake
from benchmarks.suite.systems.offloading import Offloading
from benchmarks.suite.systems.stock import Apc, NoCache
from benchmarks.suite.systems.userkv import UserKVHbm, UserKVLayerwise, UserKVLocal

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
