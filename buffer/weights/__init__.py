"""Versions of weights between a trainer and its workers: files, checksums and the ways they travel."""
