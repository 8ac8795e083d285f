"""Agent loops: how the rollouts of a prompt are made with an engine."""
