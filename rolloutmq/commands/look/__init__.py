"""Commands that show what a run does; none of them changes it."""
