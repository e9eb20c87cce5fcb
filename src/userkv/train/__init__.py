"""Training of ranking models in plain PyTorch, from a log of users' events to a directory that can be served.

Rooms that it may import: ``core``, ``ranking``, ``logs``, ``models``.
Of the watched libraries: ``torch``.
Start here: ``command.py`` (``userkv train``), ``interactions.py``, ``batches.py``, ``trainer.py``, ``evaluate.py``.
"""
