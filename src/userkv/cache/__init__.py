"""What is in HBM: users' histories, the blocks that hold them, and which user is evicted next. Pure, no vLLM."""
