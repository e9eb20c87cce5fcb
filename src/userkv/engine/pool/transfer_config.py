"""Checks vLLM's ``--kv-transfer-config`` and what the connector needs of the rest of the configuration."""

from vllm.config import VllmConfig

from userkv.core.errors import InvalidOptionError, InvalidSettingError, UnsupportedEngineError
from userkv.core.pool_settings import CONNECTOR, PoolSettings
from userkv.engine.pool.scheduler.namespace import weight_files


def check_transfer_config(config: VllmConfig) -> PoolSettings:
    """The connector's settings, checked as far as the configuration shows.

    Raises:
        InvalidSettingError: an option cannot be used.
        UnsupportedEngineError: the engine cannot use the pool.

    """
    transfer = config.kv_transfer_config
    assert transfer is not None
    settings = PoolSettings.from_extra_config(transfer.kv_connector_extra_config)
    if transfer.kv_load_failure_policy != "recompute":
        raise InvalidSettingError(
            f"{CONNECTOR} needs requests to survive failed loads; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise UnsupportedEngineError(f"{CONNECTOR} does not work with pipeline parallelism; use tensor parallelism")
    if config.scheduler_config.async_scheduling and settings.loads(transfer.kv_role) and not settings.loads_async:
        # vLLM 0.32 takes the output of a step that was scheduled before a load of the step before it was known to fail.
        raise UnsupportedEngineError(
            "load_async=false and use_layerwise load within a step, which is not safe with asynchronous scheduling; "
            "add --no-async-scheduling"
        )
    if settings.lookup_rpc_port and settings.lookup_rpc_port + config.parallel_config.world_size - 1 > 65535:
        raise InvalidOptionError(
            "lookup_rpc_port",
            f"{settings.lookup_rpc_port} leaves too few ports for the ranks; choose a lower one, or 0",
        )
    if config.parallel_config.data_parallel_size > 1 and settings.backend == "local":
        raise UnsupportedEngineError(
            "the local pool belongs to one engine; with data parallelism use the mooncake backend, or no pool"
        )
    if not settings.weights_version and config.load_config.load_format != "dummy":
        weight_files(config.model_config.model)
    return settings
