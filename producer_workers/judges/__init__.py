"""Score rollouts with functions, HTTP services and rq jobs."""
