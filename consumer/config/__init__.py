"""The config sections that a trainer reads."""
