"""Make the rollouts of a prompt with an engine."""
