"""Trainers other than the reference trainer: one file each, named by `[trainer] loop`."""
