"""The pool connector in vLLM's worker processes: KV memory, transfers, and the lookup server."""
