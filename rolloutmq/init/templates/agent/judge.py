"""Score a conversation by its last guess."""

import re

from rolloutmq import runs_inline


@runs_inline  # it is quick and cannot hang: called in the worker itself
def score(response, ground_truth, state):
    """Return 1.0 where the last number of the model's last turn is the right one, else 0.0."""
    found = re.findall(r"\d+", response)
    return float(bool(found) and found[-1] == str(ground_truth))
