"""UserKV inside vLLM: plugin, coordinator, manager, scheduler hooks, metrics, and the KV connector.

Rooms that it may import: ``core``, ``cache``, ``records``, ``ranking``, ``store``, ``models``.
Of the watched libraries: ``prometheus_client``, ``torch``, ``vllm``.
Start here: ``vllm_compat/`` (vLLM's version), ``coordinator.py``, ``manager.py``, ``pool/connector.py``.
"""
