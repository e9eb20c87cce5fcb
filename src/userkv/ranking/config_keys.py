"""Names that say in a model's directory how it ranks. They are apart because the command line needs little else."""

CONFIG_KEY = "userkv_ranking"
"""The section of ``config.json``; see ``ranking_spec.py``."""

ITEMS_FILE = "items.json"
"""The catalogue's item ids, in the order of their tokens."""
