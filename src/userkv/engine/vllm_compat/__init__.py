"""Everything that depends on the version of vLLM."""
