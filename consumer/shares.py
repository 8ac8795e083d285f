"""Who of several gets which part of a batch: shares of about the same weight."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_shares(weights: Sequence[float], ranks: int) -> list[list[int]]:
    """The places of `weights` that each rank gets, ascending; every place once.

    Longest first, each to the rank with the least so far (Graham 1969: at most 4/3 of the best there is). The same on
    every machine: ties go to the earlier place and the lower rank.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(place)
        loads[rank] += weights[place]
    return [sorted(share) for share in shares]
