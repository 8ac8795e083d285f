"""Run vLLM inside the rollout worker."""

OWNER_VARIABLE = "ROLLOUTMQ_ENGINE_OWNER"
"""Environment variable with the process id of the rollout worker that owns an engine."""
