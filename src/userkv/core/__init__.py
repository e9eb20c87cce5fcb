"""Pure logic: no vLLM, no I/O. Everything here runs in a simulator and under property tests."""
