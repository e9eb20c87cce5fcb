"""Ranking models for vLLM: they score all candidates of a request in one forward pass.

Rooms that it may import: ``core``, ``ranking``.
Of the watched libraries: ``torch``, ``transformers``, ``vllm``.
Start here: ``scorers.py`` (scores), ``ranking_model.py``, ``qwen3.py``, ``hstu/``, ``attention/``.
"""
