"""Simulate an engine: lengths and latencies without a model."""
