"""A run in a folder: saved as of one instant, and resumed from it."""
