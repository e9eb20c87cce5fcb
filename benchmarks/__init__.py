"""Benchmarks of UserKV; they need the checkout. See docs/benchmarks.md."""
