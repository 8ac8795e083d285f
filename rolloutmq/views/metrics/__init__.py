"""Metrics of a run for Prometheus, and how many workers it could use."""
