"""One short story for each invariant that a script enforces."""
