"""Run vLLM inside the rollout worker."""

OWNER_VARIABLE = "ROLLOUTMQ_ENGINE_OWNER"  # holds the process id of the rollout worker
