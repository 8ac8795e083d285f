"""Metric writers for TensorBoard and Weights & Biases."""
