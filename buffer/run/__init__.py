"""A run: made, continued after an edited config, opened, and changed while it continues."""
