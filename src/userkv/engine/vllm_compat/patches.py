"""The names of vLLM that are replaced, and what replaces them. The package's docstring says why."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import vllm.envs
import vllm.v1.core.kv_cache_manager as kv_cache_manager
import vllm.v1.core.sched.scheduler as scheduler_module
import vllm.v1.engine.core as engine_core
from vllm.config import SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.metrics.loggers import StatLoggerManager

from userkv.cache.settings import VLLM_STYLE_NAMES, CacheSettings
from userkv.core.pool_settings import CONNECTOR
from userkv.engine import admission, metrics, output_tiers, supported_engines
from userkv.engine.coordinator import KVCacheCoordinatorForGR
from userkv.engine.manager import KVCacheManagerForGR
from userkv.engine.pool.connector import MooncakeUserStoreConnector
from userkv.engine.request_adapter import skip_hashing_user_requests
from userkv.engine.scheduler import with_users

Call = inspect.BoundArguments


def install() -> None:
    """Put the user cache into this process's vLLM. Must be called once."""
    # vLLM warns about variables with its prefix that it does not know. The value is None on purpose: it would become
    # part of torch.compile's cache key, and our limits do not change any kernel.
    for name in VLLM_STYLE_NAMES:
        vllm.envs.environment_variables.setdefault(name, lambda: None)
    for owner, name, value in replacements():
        setattr(owner, name, value)
    register_connector()


def register_connector() -> None:
    """Make ``MooncakeUserStoreConnector`` known to vLLM by its name, if it is not."""
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "userkv.engine.pool.connector", CONNECTOR)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """What :func:`install` sets: owner, attribute, new value. (Tests set the same and undo it.)"""
    yield scheduler_module, "KVCacheManager", KVCacheManagerForGR
    yield kv_cache_manager, "get_kv_cache_coordinator", _make_coordinator
    yield engine_core, "get_request_block_hasher", _without_users(engine_core.get_request_block_hasher)
    yield RequestState, "make_request_output", output_tiers.to_output(RequestState.make_request_output)
    for owner, name, around in (
        (SchedulerConfig, "get_scheduler_cls", _scheduler_with_users),
        (InputProcessor, "process_inputs", _admitted),
        (AsyncLLM, "generate", _admitted_early),
        (AsyncLLM, "encode", _admitted_early),
        (StatLoggerManager, "__init__", _named),
        (StatLoggerManager, "record", _recorded),
        (engine_core.EngineCore, "set_weight_version", _new_weights),
        (EngineArgs, "create_engine_config", _checked_config),
    ):
        yield owner, name, _around(getattr(owner, name), around)


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, called by way of ``around(original, call)``, which sees the arguments by name."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, signature.bind(*args, **kwargs))

    return replacement


def _make_coordinator(
    kv_cache_config: Any,
    max_model_len: int,
    max_in_flight_tokens: int,
    use_eagle: bool,
    enable_caching: bool,
    enable_kv_cache_events: bool,
    dcp_world_size: int,
    pcp_world_size: int,
    **kwargs: Any,
) -> KVCacheCoordinatorForGR:
    supported_engines.check_kv_cache(
        kv_cache_config,
        enable_caching=enable_caching,
        use_eagle=use_eagle,
        context_parallel=max(dcp_world_size, pcp_world_size),
    )
    # Meant for several KV groups, of which there is one here.
    kwargs.pop("allow_partial_hash_hits", None)
    coordinator = KVCacheCoordinatorForGR(
        kv_cache_config,
        max_model_len,
        max_in_flight_tokens,
        use_eagle,
        enable_caching,
        enable_kv_cache_events,
        dcp_world_size,
        pcp_world_size,
        settings=CacheSettings.from_env(),
        **kwargs,
    )
    supported_engines.check_manager(coordinator.single_type_managers[0])
    return coordinator


def _without_users(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_request_block_hasher(*args: Any, **kwargs: Any) -> Any:
        return skip_hashing_user_requests(original(*args, **kwargs))

    return get_request_block_hasher


def _scheduler_with_users(original: Callable[..., type], call: Call) -> type:
    return with_users(original(*call.args))


def _admitted(original: Callable[..., Any], call: Call) -> Any:
    request = original(*call.args, **call.kwargs)
    admission.admit(call.arguments["self"].model_config, call.arguments["prompt"], request)
    return request


def _admitted_early(original: Callable[..., Any], call: Call) -> Any:
    arguments = call.arguments
    arguments["prompt"] = admission.admit_early(
        arguments["self"].model_config,
        arguments["prompt"],
        arguments.get("sampling_params"),
        arguments.get("pooling_params"),
    )
    return original(*call.args, **call.kwargs)


def _named(original: Callable[..., None], call: Call) -> None:
    original(*call.args, **call.kwargs)
    # vLLM labels its own metrics with this name; its manager does not keep it.
    model_name = call.arguments["vllm_config"].model_config.served_model_name
    call.arguments["self"].userkv_model_name = model_name


def _recorded(original: Callable[..., None], call: Call) -> None:
    snapshot = metrics.detach_snapshot(call.arguments["scheduler_stats"])
    if snapshot is not None:
        manager, engine_index = call.arguments["self"], call.arguments.get("engine_idx") or 0
        metrics.observe(snapshot, manager.userkv_model_name, engine_index)
    original(*call.args, **call.kwargs)


def _checked_config(original: Callable[..., Any], call: Call) -> Any:
    config = original(*call.args, **call.kwargs)
    supported_engines.check_config(config)
    return config


def _new_weights(original: Callable[..., None], call: Call) -> None:
    original(*call.args, **call.kwargs)
    scheduler, version = call.arguments["self"].scheduler, call.arguments["weight_version"]
    connector = scheduler.get_kv_connector()
    if isinstance(connector, MooncakeUserStoreConnector):
        connector.set_weights_version(version)
    else:
        scheduler.kv_cache_manager.reset_prefix_cache()
