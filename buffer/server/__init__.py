"""The server of a run: found, checked, started, or played in memory."""
