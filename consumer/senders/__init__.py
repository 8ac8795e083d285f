"""Senders of weights from the memory of the trainer: gloo and nccl."""
