"""Commands that start the parts of a run."""
