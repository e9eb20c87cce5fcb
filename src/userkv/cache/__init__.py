"""What is in HBM: users' histories, the blocks that hold them, and which user is evicted next.

Rooms that it may import: ``core``.
Of the watched libraries: none.
Start here: ``user_cache.py``, ``hit.py``, ``block_table.py``, ``evictions.py``, ``policies/``.
"""
