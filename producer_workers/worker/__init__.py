"""The rollout worker: claims jobs, runs agent loops, submits groups."""
