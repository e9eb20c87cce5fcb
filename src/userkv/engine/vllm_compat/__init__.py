"""Everything that depends on the version of vLLM. Written against vLLM 0.32.0.

vLLM has no extension point for the prefix-cache coordinator. So ``patches.py`` replaces the names below, once per
process, and only if ``KV_MANAGER_FOR_GR`` is on. Each replacement calls the original.

| vLLM name | why |
|---|---|
| ``core.sched.scheduler.KVCacheManager`` | the look-up has to see the request, not only its hashes |
| ``core.kv_cache_manager.get_kv_cache_coordinator`` | the coordinator with the user block table |
| ``SchedulerConfig.get_scheduler_cls`` | single flight, figures for ``/metrics`` |
| ``engine.core.get_request_block_hasher`` | user requests are read in the input thread and never hashed |
| ``InputProcessor.process_inputs`` | bad requests are refused before any compute |
| ``AsyncLLM.generate`` / ``encode`` | the same before a streamed HTTP response has begun with status 200 |
| ``RequestState.make_request_output`` | outputs say which tiers a history came from |
| ``StatLoggerManager.__init__`` / ``record`` | figures arrive in the API server |
| ``EngineCore.set_weight_version`` | KV of other weights is not found any more, in HBM and in the pool |
| ``EngineArgs.create_engine_config`` | unsupported engines are refused in the user's own process |

A KV connector needs no replacement: vLLM's factory registers it by name.
"""
