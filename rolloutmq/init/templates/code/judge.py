"""Score a program by the share of its tests that it passes."""

from producer_workers.judges.built_in import python_tests


def score(response, ground_truth, state):
    """Return the share of passed tests, and 0.1 less for an answer without a code block."""
    reward = python_tests(response=response, ground_truth=ground_truth)
    has_block = "```" in response
    return {"score": reward["score"] - 0.1 * (not has_block), "passed": reward["score"]}
