"""Eviction policies, one per file, and their names.

``adaptive`` is the default because it was within 2 % of the best of the others on every workload measured
(docs/benchmarks.md, "Eviction policies"), which none of them was.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from userkv.cache.policies.adaptive import AdaptiveUserPolicy
from userkv.cache.policies.lru import UserKVLRUManager
from userkv.cache.policies.policy import EvictionPolicy

LRU, ADAPTIVE, FREQUENCY = "lru", "adaptive", "frequency"
DEFAULT = ADAPTIVE

POLICIES: dict[str, Callable[[float, float], EvictionPolicy[Any]]] = {
    ADAPTIVE: AdaptiveUserPolicy,
    FREQUENCY: lambda capacity, max_users: AdaptiveUserPolicy(capacity, max_users, half_lives=(32.0,)),
    LRU: lambda capacity, max_users: UserKVLRUManager(),
}
"""Makes an empty policy of a name, for a cache of a capacity that holds so many users at most."""


def make_policy(name: str, capacity: float, max_users: int = 0) -> EvictionPolicy[Any]:
    """An empty policy.

    Args:
        name: one of :data:`POLICIES`.
        capacity: of the cache, in the unit of the sizes that the policy will be told.
        max_users: how many users it holds at most; 0 = no limit.

    """
    return POLICIES[name](capacity, max_users or inf)
