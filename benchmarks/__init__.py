"""Measure the buffer beside raw Redis: `python -m benchmarks`, or `make bench`."""
