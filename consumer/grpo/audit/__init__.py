"""Audits of workers: a sample of what they submit is computed again."""
