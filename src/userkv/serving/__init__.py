"""``userkv serve``, ``userkv rank``, ``userkv pool``, and ``/v1/rank`` on vLLM's own server.

Rooms that it may import: ``core``, ``cache``, ``ranking``, ``client``, ``store``, ``engine``.
Of the watched libraries: ``prometheus_client``, ``requests``, ``torch``, ``transformers``, ``vllm``.
Start here: ``rank/service.py`` (a ranking request), ``launch.py`` (``userkv serve``), ``pool_command.py``.
"""
