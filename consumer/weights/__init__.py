"""Weights on their way out."""
