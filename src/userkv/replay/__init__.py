"""Workloads from logs or a generator, and the driver that replays them against a server or an engine.

Rooms that it may import: ``core``, ``cache``, ``ranking``, ``logs``, ``client``, ``serving``.
Of the watched libraries: ``aiohttp``, ``prometheus_client``, ``vllm``.
Start here: ``command.py`` (``userkv replay``), ``workload.py``, ``driver.py``, ``report.py``.
"""
