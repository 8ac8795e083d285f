"""One step without its model: `policy/scores.safetensors` of a bundle.

It has a tensor for each forward pass of the step: log-probability and entropy of the response
tokens, float32[2, N]. The learner's own code trains the step on these. Rewards, advantages, masks
and losses then come out as they did with the model; gradients and the state do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from buffer.errors import ConfigError, ModelError
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.train_controller import COMPUTED, TrainController
from consumer.grpo.model_state.learner_state import TrainedModel
from consumer.grpo.model_state.saved_state import SavedState
from consumer.grpo.policy.column_readers import MaskReader
from consumer.grpo.policy.logprobs import TargetLogits
from consumer.grpo.policy.micro_batch import MicroBatch, Packer
from consumer.grpo.policy.model_checks import keeps_samples_apart
from consumer.grpo.policy.policy import Policy
from consumer.grpo.policy.vocabulary_projection import TokenLogprobs
from consumer.grpo.reporting.metrics import BatchColumns, staleness_metrics
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.ranks import ALONE, select_device
from consumer.handle.step_log import read_steps
from rolloutmq.extensions.records.replay import OF_THE_MACHINE, Difference, differing
from rolloutmq.extensions.records.step_file import StepFile, config_of

SCORES = Path("policy/scores.safetensors")


class RecordedPolicy(Policy):
    """Returns the scores of forward passes, in their order. Its gradient is 0."""

    def __init__(self, config: LearnerConfig, scores: list[Tensor]) -> None:
        nothing = nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([nothing], lr=0.0)
        TrainedModel.__init__(self, {"nothing": nothing}, optimizer, torch.device("cpu"))
        self.config, self.ranks, self._adapter = config, ALONE, None
        self.logits = cast(TargetLogits, nn.Module())
        self.reference = self.logits if config.loss.has_own_reference else None
        self.readers = [MaskReader(needed=not config.allow_truncated_sampling)]
        self.packer = Packer(config.token_budget, readers=self.readers)
        self._scores = scores

    def score(self, batch: MicroBatch, **_: Any) -> TokenLogprobs:
        found = self._scores.pop(0) if self._scores else torch.zeros(2, 0)
        if found.shape != (2, len(batch.targets)):
            raise ModelError(
                "the step has other forward passes here than where the bundle was made",
                hint="install the version of rolloutmq that its step.json names",
            )
        logprobs, entropy = found + 0.0 * self.parameters["nothing"]
        return TokenLogprobs(logprobs, entropy)


def record_step(run: Path, file: StepFile, target: Path) -> list[Difference]:
    """Train a step of a run, and write its scores; return what differs from the run's log."""
    config = config_of(file.facts.config, run={"dir": str(run)})
    device = select_device(config.trainer.device, ALONE)
    policy = Policy(config.model_folder, config.learner, device=device, seed=config.run.seed)
    needs_more = config.learner.distillation or config.learner.replay_routing or config.run.columns
    is_other = config.trainer.advantages in COMPUTED or not keeps_samples_apart(policy.logits)
    if needs_more or is_other:
        raise ConfigError(
            "this step needs its model: two numbers for each token do not decide about its losses",
            hint="leave out --logprobs, and raise --max-mb",
        )
    controller = TrainController.of(config, policy, config.model_folder)
    if file.facts.step > 1:
        before = CheckpointFolder(run / "checkpoints").path(file.facts.step - 1)
        with SavedState(before, controller.shard_rows()) as state:
            controller.load_state_tensors(state)
    scores: dict[str, Tensor] = {}
    score = policy.score

    def recorded(batch: MicroBatch, **options: Any) -> TokenLogprobs:
        found = score(batch, **options)
        scores[str(len(scores))] = torch.stack([found.logprobs, found.entropy]).detach().cpu()
        return found

    policy.score = recorded  # type: ignore[method-assign]
    _, different = _train(controller, run, file)
    save_file(scores, target)
    return different


def check_step(run: Path, file: StepFile) -> tuple[int, list[Difference]]:
    """Train an unpacked bundle; return how many numbers were compared, and those that differ."""
    config = config_of(file.facts.config, run={"dir": str(run)})
    scores = load_file(run / SCORES)
    policy = RecordedPolicy(config.learner, [scores[key] for key in sorted(scores, key=int)])
    return _train(TrainController.of(config, policy, run), run, file)


def _train(controller: TrainController, run: Path, file: StepFile) -> tuple[int, list[Difference]]:
    groups = file.groups()
    metrics = controller.fit(groups)
    columns = BatchColumns.of(groups, controller.advantages, controller.fates)
    metrics |= columns.metrics() | staleness_metrics(file.manifest)
    known = next((each for each in read_steps(run) if each.step == file.facts.step), None)
    unknown = ("optim/", *OF_THE_MACHINE)  # the gradient's
    ours = {name: value for name, value in metrics.items() if not name.startswith(unknown)}
    compared = len(ours.keys() & known.metrics.keys()) if known else 0
    return compared, differing(ours, known, tolerance=1e-6)  # machines add in other orders
