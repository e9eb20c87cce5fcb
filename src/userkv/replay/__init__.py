"""Workloads from logs or a generator, and the driver that replays them against a server or an engine."""
