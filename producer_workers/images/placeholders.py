"""The tokens of a prompt that stand for its images: each is a run of the model's image token.

Models that write more than such a run into the prompt (rows, tiles) are refused where that is met.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def find_runs(prompt_ids: NDArray[np.int32], image_token: int, tokens: Sequence[int]) -> list[slice]:
    """Where the images lie whose numbers of tokens are `tokens`, in order. ValueError where they do not fit."""
    places = np.flatnonzero(prompt_ids == image_token)
    runs, done = [], 0
    for number, count in enumerate(tokens):
        place = places[done : done + count]
        if not 0 < len(place) == count or place[-1] - place[0] != count - 1:
            raise ValueError(f"the prompt has no {count} tokens {image_token} in a row for image {number}")
        runs.append(slice(int(place[0]), int(place[-1]) + 1))
        done += count
    return runs


def collapse(prompt_ids: NDArray[np.int32], runs: Sequence[slice]) -> list[int]:
    """The prompt with one image token for each run: as processors of models want it."""
    kept = np.ones(len(prompt_ids), bool)
    for run in runs:
        kept[run.start + 1 : run.stop] = False
    collapsed: list[int] = prompt_ids[kept].tolist()
    return collapsed
