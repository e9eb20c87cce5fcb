"""UserKV: a user-granular KV cache for generative recommendation on vLLM."""

__version__ = "0.1.0"
