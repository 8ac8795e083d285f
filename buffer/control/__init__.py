"""The control state of a run: pauses, the fleet of workers, progress, events, live settings."""
