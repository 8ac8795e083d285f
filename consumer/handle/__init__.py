"""The trainer's handle on a run: take, wait, commit, pause and publish. For every trainer."""
