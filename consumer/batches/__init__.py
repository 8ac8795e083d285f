"""Batches on their way to the trainer: reading, prefetching, waiting, evaluation rounds."""
