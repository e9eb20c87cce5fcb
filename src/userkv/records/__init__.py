"""What a pool holds of a user: the record and its keys, and what to load and to save.

Rooms that it may import: ``core``.
Of the watched libraries: none.
Start here: ``record.py`` (the record's bytes), ``keys.py``, ``load_plan.py``, ``save_plan.py``.
"""
