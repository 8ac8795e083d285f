"""The simulated engine: lengths and latencies without a model."""
