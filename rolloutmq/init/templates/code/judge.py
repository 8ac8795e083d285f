"""Score a program by the share of its tests that it passes."""

from producer_workers.judges.built_in import python_tests
from producer_workers.user_code.sandbox import check_sandbox

# "bubblewrap": a program sees nothing but its interpreter. "weak": it may read what you may; it was
# chosen here if bubblewrap did not work on the machine where this file was written.
SANDBOX = "$sandbox"
check_sandbox(SANDBOX)  # a run does not start without it


def score(response, ground_truth, state):
    """Return the share of passed tests, and 0.1 less for an answer without a program."""
    reward = python_tests(response=response, ground_truth=ground_truth, sandbox=SANDBOX)
    return {**reward, "score": reward["score"] - 0.1 * reward["unparsed"]}
