"""Ranking models for vLLM: they score all candidates of a request in one forward pass (see ``ranking/prompt.py``)."""
