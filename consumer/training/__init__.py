"""The reference trainer: advantages, losses, packing, the learner, checkpoints."""
