"""Weights, gradients and optimizer state: sharded over ranks, saved, read and published."""
