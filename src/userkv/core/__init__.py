"""What all rooms share: errors, sizes, tokens, the request contract, settings of the pool.

Rooms that it may import: none.
Of the watched libraries: none.
Start here: ``request.py`` (what a request says of its user), ``tokens.py``, ``errors.py``, ``pool_settings.py``.
"""
