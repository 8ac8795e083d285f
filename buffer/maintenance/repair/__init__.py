"""Repair of a run that was damaged on its server, from what is recorded twice."""
