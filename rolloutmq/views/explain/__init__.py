"""Readings that explain a run: shares of lost groups, rows that fail, logs, who waited."""
