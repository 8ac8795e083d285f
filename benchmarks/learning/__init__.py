"""Measure learning and the cost of staleness with a small model and a real server."""
