"""Clean up: the janitor, media files that no group needs, removal of a run."""
