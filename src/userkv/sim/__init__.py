"""What a cache of users would do with a trace: the code of ``cache`` on blocks that hold nothing.

Rooms that it may import: ``core``, ``cache``.
Of the watched libraries: none.
Start here: ``hbm.py`` (HBM), ``pool.py`` (a pool beneath), ``trace.py`` (the input), ``belady.py``, ``apc.py``.
"""
