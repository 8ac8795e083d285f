"""Programs that a user may copy; each is run by a test."""
