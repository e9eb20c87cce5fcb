"""Readers of recommendation logs and workload files. Used by ``replay`` and ``train``."""
