"""Weights from the memory of the trainer to the processes of engines: gloo and nccl."""
