"""Readings that explain a run: what stops it, lost groups, failing rows, logs, who waited."""
