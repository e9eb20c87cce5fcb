"""The pool: where users' KV is kept outside the engine. Knows nothing of vLLM."""
