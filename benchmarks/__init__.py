"""How fast the buffer is, beside raw Redis and the naive ways: `python -m benchmarks`, or `make
bench`.
"""
