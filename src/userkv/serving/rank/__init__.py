"""``POST /v1/rank`` on vLLM's own server, as an endpoint plugin."""
