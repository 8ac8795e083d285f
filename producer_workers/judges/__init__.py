"""Judges: functions, HTTP services and rq jobs that score rollouts."""
