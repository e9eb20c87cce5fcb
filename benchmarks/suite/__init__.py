"""The comparison suite: one workload after the other through one system after the other, on one machine."""
