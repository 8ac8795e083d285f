"""Policy weights: how they are announced, and how they travel."""
