"""Commands that change a running run."""
