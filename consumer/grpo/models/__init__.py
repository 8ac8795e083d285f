"""Models of the trainer: folders, the tiny model of the demo and its warm start."""
