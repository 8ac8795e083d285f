"""The process of a rollout worker: claims, control state, heartbeats."""
