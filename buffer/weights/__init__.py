"""Versions of weights between a trainer and its workers: files, checksums, transports."""
