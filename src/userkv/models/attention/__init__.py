"""Attention in which candidates see the history and themselves, never each other, over vLLM's paged KV cache."""
