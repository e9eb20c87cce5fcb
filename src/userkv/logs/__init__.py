"""Readers of recommendation logs and workload files.

Rooms that it may import: ``core``.
Of the watched libraries: none.
Start here: ``formats.py`` (all formats), ``events.py``, ``otto.py`` (one format), ``workload_file.py``.
"""
