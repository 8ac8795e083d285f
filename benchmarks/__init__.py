"""Measure the buffer beside raw Redis and naive ways: `python -m benchmarks`, or `make bench`."""
