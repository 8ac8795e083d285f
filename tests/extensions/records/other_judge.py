"""Judges of stored responses."""

from rolloutmq import Skip


def reversed_score(*, response: str, ground_truth: object = None, state: object = None) -> float:
    """Return 1 for the rollouts that had 0: those at even places of a group."""
    return float(getattr(state, "index", 0) % 2 == 0)


def fails(*, response: str, ground_truth: object = None, state: object = None) -> float:
    raise ValueError("no verdict")


def skips(*, response: str, ground_truth: object = None, state: object = None) -> float:
    raise Skip("nobody knows")
