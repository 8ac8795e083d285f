"""Adapters that the configs of other trainers name: each imports its trainer."""
