import pytest

from userkv.cache.settings import CacheSettings
from userkv.core.errors import InvalidSettingError


def test_defaults_are_the_documented_ones() -> None:
    settings = CacheSettings.from_env({})
    assert settings == CacheSettings(
        enabled=False, lru=True, max_users=100, min_free_blocks=0, single_flight_seconds=5.0, policy="adaptive"
    )


def test_every_variable_is_read() -> None:
    env = {
        "KV_MANAGER_FOR_GR": "1",
        "VLLM_ENABLE_USER_KV_LRU": "off",
        "VLLM_USER_KV_LRU_MAX_USERS": "0",
        "VLLM_USER_KV_LRU_MIN_FREE_BLOCKS": "7",
        "USERKV_SINGLE_FLIGHT_MAX_WAIT_MS": "250",
        "USERKV_EVICTION_POLICY": "Frequency",
    }
    assert CacheSettings.from_env(env) == CacheSettings(True, False, 0, 7, 0.25, "frequency")


def test_asking_for_lru_by_the_fields_own_name_gives_lru() -> None:
    assert CacheSettings.from_env({"VLLM_ENABLE_USER_KV_LRU": "1"}).policy == "lru"
    assert CacheSettings.from_env({"VLLM_ENABLE_USER_KV_LRU": "0"}).policy == "adaptive"
    both = {"VLLM_ENABLE_USER_KV_LRU": "1", "USERKV_EVICTION_POLICY": "adaptive"}
    assert CacheSettings.from_env(both).policy == "adaptive"


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidSettingError, match="must be one of adaptive, frequency, lru, not 'fifo'"):
        CacheSettings.from_env({"USERKV_EVICTION_POLICY": "fifo"})


@pytest.mark.parametrize("text", ["1", "true", "ON", " yes "])
def test_switch_on(text: str) -> None:
    assert CacheSettings.from_env({"KV_MANAGER_FOR_GR": text}).enabled


def test_switched_off_no_other_variable_matters() -> None:
    assert not CacheSettings.is_enabled({"VLLM_USER_KV_LRU_MAX_USERS": "-1"})
    assert CacheSettings.is_enabled({"KV_MANAGER_FOR_GR": "1", "VLLM_USER_KV_LRU_MAX_USERS": "-1"})


@pytest.mark.parametrize("text", ["", "0", "False", "no", "off"])
def test_switch_off(text: str) -> None:
    assert not CacheSettings.from_env({"KV_MANAGER_FOR_GR": text}).enabled


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KV_MANAGER_FOR_GR", "maybe"),
        ("VLLM_USER_KV_LRU_MAX_USERS", "-1"),
        ("VLLM_USER_KV_LRU_MAX_USERS", "many"),
        ("VLLM_USER_KV_LRU_MIN_FREE_BLOCKS", "1.5"),
        ("USERKV_SINGLE_FLIGHT_MAX_WAIT_MS", "²"),
    ],
)
def test_bad_values_are_named(name: str, text: str) -> None:
    with pytest.raises(InvalidSettingError, match=name):
        CacheSettings.from_env({name: text})
