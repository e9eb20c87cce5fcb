"""The pool inside vLLM: ``MooncakeUserStoreConnector``, its two halves, and what passes between them."""
