"""Models with the weights that groups name, as long as the trainer keeps these weights."""

from __future__ import annotations

from pathlib import Path

from buffer.errors import ModelError
from buffer.rollouts.rollout import FIRST_WEIGHTS, PolicyVersion
from buffer.run import Run
from buffer.weights.registry import find_version, open_receiver
from consumer.config.learner import LearnerConfig
from consumer.config.training import TrainingConfig
from consumer.grpo.learner.learner import Learner
from consumer.handle.ranks import ALONE, select_device


class KeptWeights:
    """Loads one version of weights at a time, as the trainer computes with them."""

    def __init__(self, run: Run, config: TrainingConfig) -> None:
        self._run = run
        self._config = config
        self._receiver = open_receiver(run.store, run.keys)
        self._loaded: tuple[PolicyVersion, Learner] | None = None

    def load(self, weights: PolicyVersion) -> Learner:
        """Return a learner with these weights; the one before is not usable any more.

        Raises ModelError where they were deleted, WireError or OSError where they are damaged.
        """
        if self._loaded is None or self._loaded[0] != weights:
            folder = self._folder(weights)
            self._loaded = None  # its memory is needed
            device = select_device(self._config.trainer.device, ALONE)
            config = without_training(self._config.learner)
            learner = Learner(folder, config, device=device, media=self._run.media)
            self._loaded = weights, learner
        return self._loaded[1]

    def _folder(self, weights: PolicyVersion) -> Path:
        if weights == FIRST_WEIGHTS:
            return self._config.model_folder
        policy = self._config.policy
        kept = policy.weights_folder(self._config.run)
        published = find_version(self._run.store, self._run.keys, kept, weights)
        if published is None:
            raise ModelError(
                f"the weights {weights} are not kept any more",
                hint="raise [trainer] keep_weights",
            )
        folder = self._receiver.fetch(published)
        self._receiver.keep_only(folder)
        return folder

    def close(self) -> None:
        """Delete local copies."""
        self._receiver.close()


def without_training(config: LearnerConfig) -> LearnerConfig:
    """Return the config of a learner that only computes logprobs: no reference, no compiler."""
    loss = config.loss.model_copy(update={"kl_coef": 0.0})
    return config.model_copy(
        update={"loss": loss, "compile": False, "optimizer": "adamw", "updates_per_batch": 1}
    )
