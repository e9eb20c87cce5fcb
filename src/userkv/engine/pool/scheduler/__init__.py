"""The pool connector in vLLM's scheduler process: what to load, what to save, and when."""
