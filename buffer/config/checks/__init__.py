"""Checks of a config file: its keys, and what its sections demand of each other."""
