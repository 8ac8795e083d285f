"""Measure put and take next to the queues of other projects, as their packages come."""
