"""Clean up: files of large columns, removal of a run."""
