"""Score an answer: right where its last number is that of the ground truth."""

import re

from rolloutmq import runs_inline

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


@runs_inline  # it is quick and cannot hang: called in the worker itself
def score(response, ground_truth, state):
    """Return 1.0 for the right number, else 0.0."""
    return float(last_number(response) == last_number(str(ground_truth)) is not None)


def last_number(text):
    """Return the last number of a text, or None for a text without numbers."""
    found = NUMBER.findall(text[-200:])
    return float(found[-1].replace(",", "")) if found else None
