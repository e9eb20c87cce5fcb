"""The pool: where users' KV is kept outside the engine.

Rooms that it may import: ``core``, ``cache``, ``records``.
Of the watched libraries: none.
Start here: ``user_store.py`` (users, commit), ``backend.py`` (the backends' contract), ``local/``, ``mooncake/``.
"""
