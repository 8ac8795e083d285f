"""From groups to new weights: filter, advantages, losses, and the optimizer steps."""
