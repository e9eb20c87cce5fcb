"""Real input: readers of recommendation logs, workloads, a generator and the replay driver."""
