"""What a ranking request means: items, their tokens, history windows, and a model's ranking section.

Rooms that it may import: ``core``.
Of the watched libraries: none.
Start here: ``prompt.py`` (the prompt of a ranking), ``spec.py`` (how a model ranks), ``item_codec.py``.
"""
