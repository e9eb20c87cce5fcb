"""The only package that imports vLLM: plugin entry point, coordinator, manager, scheduler hooks, metrics."""
