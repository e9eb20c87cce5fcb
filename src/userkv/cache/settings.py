"""Settings of the HBM cache, read once from the environment.

``KV_MANAGER_FOR_GR`` and the three ``VLLM_*`` names are the field's own; the others start with ``USERKV_``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from userkv.cache.policies import DEFAULT, LRU, POLICIES
from userkv.core import options
from userkv.core.errors import InvalidOptionError

ENABLE = "KV_MANAGER_FOR_GR"
ENABLE_LRU = "VLLM_ENABLE_USER_KV_LRU"
MAX_USERS = "VLLM_USER_KV_LRU_MAX_USERS"
MIN_FREE_BLOCKS = "VLLM_USER_KV_LRU_MIN_FREE_BLOCKS"
POLICY = "USERKV_EVICTION_POLICY"
SINGLE_FLIGHT_MS = "USERKV_SINGLE_FLIGHT_MAX_WAIT_MS"

VLLM_STYLE_NAMES = (ENABLE_LRU, MAX_USERS, MIN_FREE_BLOCKS)
"""UserKV's variables with vLLM's prefix; vLLM warns about such names unless they are registered."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How the user block table behaves.

    Attributes:
        enabled: replace vLLM's prefix-cache coordinator (``KV_MANAGER_FOR_GR``, off).
        lru: keep to ``max_users`` and ``min_free_blocks`` all the time by evicting users (``VLLM_ENABLE_USER_KV_LRU``,
            on). Off: users are evicted only when a request needs their blocks.
        max_users: users held in HBM at most (``VLLM_USER_KV_LRU_MAX_USERS``, 100; 0 = no limit).
        min_free_blocks: KV blocks kept free for requests to come (``VLLM_USER_KV_LRU_MIN_FREE_BLOCKS``, 0: as many as
            the prefixes of ordinary requests are seen to need).
        single_flight_seconds: how long a request waits while another request computes the same user's history
            (``USERKV_SINGLE_FLIGHT_MAX_WAIT_MS`` / 1000, 5; 0 = never wait).
        policy: the order of eviction, one of :data:`userkv.cache.policies.POLICIES` (``USERKV_EVICTION_POLICY``). By
            default ``adaptive``, or ``lru`` where ``VLLM_ENABLE_USER_KV_LRU`` asks for it by being set to 1.

    """

    enabled: bool = False
    lru: bool = True
    max_users: int = 100
    min_free_blocks: int = 0
    single_flight_seconds: float = 5.0
    policy: str = DEFAULT

    @staticmethod
    def is_enabled(env: Mapping[str, str] | None = None) -> bool:
        """Whether the cache is on at all; looks at no other variable.

        Raises:
            InvalidSettingError: ``KV_MANAGER_FOR_GR`` is neither on nor off.

        """
        return _flag(os.environ if env is None else env, ENABLE, False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "CacheSettings":
        """Read the settings.

        Raises:
            InvalidSettingError: a variable has a value that cannot be used.

        """
        env = os.environ if env is None else env
        default = cls()
        return cls(
            enabled=_flag(env, ENABLE, default.enabled),
            lru=_flag(env, ENABLE_LRU, default.lru),
            max_users=_count(env, MAX_USERS, default.max_users),
            min_free_blocks=_count(env, MIN_FREE_BLOCKS, default.min_free_blocks),
            single_flight_seconds=_count(env, SINGLE_FLIGHT_MS, int(default.single_flight_seconds * 1000)) / 1000,
            policy=_policy(env),
        )


def _flag(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name, "").strip()
    return options.switch(name, text) if text else default


def _policy(env: Mapping[str, str]) -> str:
    name = env.get(POLICY, "").strip().lower()
    if name == "":
        return LRU if _flag(env, ENABLE_LRU, False) else DEFAULT
    if name not in POLICIES:
        raise InvalidOptionError(POLICY, f"must be one of {', '.join(POLICIES)}, not {env[POLICY]!r}")
    return name


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    return options.whole_number(name, text, 0) if text else default
