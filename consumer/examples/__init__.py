"""Trainers that are not ours, on a run of ours. Each is one file, and `[trainer] loop` of a config names it."""
