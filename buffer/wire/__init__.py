"""Rollouts and groups of them, as objects, as tables, and as bytes (the wire format)."""
