"""The config sections that workers and the producer read."""
