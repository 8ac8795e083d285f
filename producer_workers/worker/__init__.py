"""The rollout worker: claims groups, samples and judges them, submits them, reports to the run."""
