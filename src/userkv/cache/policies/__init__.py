"""Eviction policies: which user loses its blocks next. One policy per file; the contract is in ``policy.py``.

``adaptive`` is the default. It alone was within 2 % of the best policy on every workload measured (docs/benchmarks.md,
"Eviction policies").
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
"""Constructors of empty policies by name. Arguments: the cache's capacity, and the users that it holds at most."""


def make_policy(name: str, capacity: float, max_users: int = 0) -> EvictionPolicy[Any]:
    """An empty policy.

    Args:
        name: one of :data:`POLICIES`.
        capacity: of the cache, in the unit of the sizes that the policy will get.
        max_users: how many users it holds at most; 0 = no limit.

    """
    return POLICIES[name](capacity, max_users or inf)
