"""What a ranking request means: items, their tokens, history windows, and a model's ranking section. Pure, no vLLM."""
