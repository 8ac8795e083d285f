"""The auditor: a trusted process that computes logprobs of some groups of each batch again.

It chooses groups at random after they were submitted, so no worker can predict the choice, and
neither groups nor steps wait for it. Per batch: (1) read position and batches, (2) choose and read
groups, (3) compare logprobs under the weights that their tokens name, (4) append to audit.jsonl,
(5) one script: findings, bars, new position, (6) revoke what barred workers hold.

dies before 5       the next auditor chooses anew from the same batch
dies before 6       a barred worker may submit what it holds; it claims nothing more
payload freed       the group counts as impossible
weights deleted     the group counts as impossible ([trainer] keep_weights)
batch freed         counts as missed: the auditor was away, or is too slow
trainer rolls back  a batch that is taken again has another time, and is audited again
two auditors        the script refuses the slower one
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError, ModelError, PayloadMissing, WireError
from buffer.ids import NAME
from buffer.ledger.audits import AuditFinding, AuditPosition
from buffer.manifest import Manifest, ManifestEntry
from buffer.run import Run
from buffer.weights.receiver import WeightsReceiver, find_version
from buffer.wire.framing import signers
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion
from consumer.config.learner import LearnerConfig
from consumer.config.trainer import TrainingConfig
from consumer.grpo.audit.audit_log import MadeGroup, add_batch
from consumer.grpo.learner.learner import Learner
from consumer.handle.ranks import ALONE, select_device
from consumer.handle.reader import check_content

MOST_VERSIONS = 32  # of an audited group: each may have to be loaded


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between a group's logprobs and those of the weights that its tokens name.

    Measured with honest engines on a CPU (tiny Qwen3 models, 24 groups of one rollout, 4,400
    tokens), in nats. The worst groups have a few tokens only.

    engine                   trainer    rms      worst group   worst token
    vLLM, float32            float32    2e-6     3e-6          1e-5
    vLLM, float32            bfloat16   0.038    0.044         0.24
    vLLM, bfloat16           float32    0.040    0.057         0.27
    vLLM, bfloat16           bfloat16   0.046    0.058         0.30
    transformers, float32    float32    3e-6     4e-6          1e-5
    transformers, float32    bfloat16   0.039    0.150         0.21
    transformers, bfloat16   bfloat16   0.049    0.096         0.25
    other weights            float32    > 3.9

    [audit] tolerance is five times the rms in bfloat16 by default; in float32, 0.01 is enough.
    """

    tokens: int = 0
    squares: float = 0.0

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(1, self.tokens))

    def __add__(self, other: Difference) -> Difference:
        return Difference(self.tokens + other.tokens, self.squares + other.squares)


NOTHING = Difference()


def versions_of(group: RolloutGroup) -> set[PolicyVersion]:
    return {weights for weights, _ in _parts(group)}


def check_auditable(group: RolloutGroup) -> None:
    """Raise WireError if the group's trained tokens cannot be computed again."""
    if group.multimodal:
        raise WireError("it has images, which an audit does not read")
    if changes := {sample.changes() for sample in group.samples} - {""}:
        raise WireError(
            f"it was sampled with {', '.join(sorted(changes))}: what that left of the distribution "
            "is its worker's word"
        )
    versions = versions_of(group)
    if len(versions) > MOST_VERSIONS:
        raise WireError(f"its tokens name {len(versions)} versions of weights")
    if not all(NAME.fullmatch(weights.lineage) for weights in versions):
        raise WireError("its tokens name weights that no trainer can have published")
    has_version = np.zeros(len(group.mask), np.bool_)
    for _, part in _parts(group):
        has_version[part] = True
    if (~has_version & (group.mask > 0)).any():
        raise WireError("it has trained tokens that name no weights")


def compare(learner: Learner, weights: PolicyVersion, group: RolloutGroup) -> Difference:
    """Compare the tokens that name `weights` with the learner's model. Raises WireError."""
    check_content(group, learner.vocabulary)
    computed = _logprobs(learner, group)
    parts = [part for own, part in _parts(group) if own == weights]
    found = np.concatenate([group.logprobs[part] - computed[part] for part in parts])
    return Difference(len(found), float(np.square(found, dtype=np.float64).sum()))


def _logprobs(learner: Learner, group: RolloutGroup) -> NDArray[np.float32]:
    """Return the logprobs of all response tokens, float32[R]."""
    starts = np.cumsum(group.lengths) - group.lengths
    found = np.zeros(len(group.logprobs), np.float32)
    (update,) = learner.pack([group]).updates
    for batch in update.batches:
        # of the whole distribution: a mask is the worker's word
        values = learner.logprobs(replace(batch, sampled_from=None)).float().cpu().numpy()
        for rollout in batch.rollout.tolist():
            start, length = int(starts[rollout]), int(group.lengths[rollout])
            found[start : start + length] = values[:length]
            values = values[length:]
    return found


def _parts(group: RolloutGroup) -> Iterator[tuple[PolicyVersion, slice]]:
    """Yield the weights of each span, and its part of the token columns."""
    starts = np.cumsum(group.lengths) - group.lengths
    for start, spans in zip(starts.tolist(), group.spans(), strict=True):
        for span in spans:
            first = start + span.start
            if span.length:
                yield PolicyVersion(span.lineage, span.version), slice(first, first + span.length)


class KeptWeights:
    def __init__(self, run: Run, config: TrainingConfig) -> None:
        self._run = run
        self._config = config
        self._receiver = WeightsReceiver(run.store, run.keys)
        self._loaded: tuple[PolicyVersion, Learner] | None = None

    def load(self, weights: PolicyVersion) -> Learner:
        """Return a learner with these weights; the previous one becomes unusable.

        Raises ModelError for deleted weights, WireError or OSError for damaged ones.
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
                f"the weights {weights} are not kept any more", hint="raise [trainer] keep_weights"
            )
        folder = self._receiver.fetch(published)
        self._receiver.keep_only(folder)
        return folder

    def close(self) -> None:
        self._receiver.close()


def without_training(config: LearnerConfig) -> LearnerConfig:
    """Return the config of a learner that only computes logprobs: no reference, no compiler."""
    loss = config.loss.model_copy(update={"kl_coef": 0.0})
    return config.model_copy(
        update={"loss": loss, "compile": False, "optimizer": "adamw", "updates_per_batch": 1}
    )


log = logging.getLogger("rolloutmq.audit")

POLL_S = 1.0

_FIELDS = ("owner", "payload", "continued", "lineage", "version")


@dataclass(slots=True)
class _Chosen:
    """A group that is audited; `problem`: why that is impossible."""

    made: MadeGroup
    group: RolloutGroup | None = None
    problem: str = ""
    difference: Difference = NOTHING

    @property
    def versions(self) -> set[PolicyVersion]:
        return versions_of(self.group) if self.group and not self.problem else set()


class Auditor:
    def __init__(self, run: Run, config: TrainingConfig) -> None:
        for problem in _problems(config):
            raise ConfigError(
                f"the rollouts of this config cannot be audited: {problem}",
                hint="change that, or let only workers sample that you trust",
            )
        self._run = run
        self._config = config
        self._weights = KeptWeights(run, config)
        self._random = secrets.SystemRandom()

    def serve(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if not self.audit_next():
                stop.wait(POLL_S)
        self._weights.close()

    def audit_next(self) -> bool:
        """Audit the oldest new batch, at first the newest one; return whether there was one."""
        before = self._run.audits.read().position
        manifest = self._next_batch(before)
        if manifest is None:
            return False
        made = self._makers(manifest)
        chosen = [
            self._read(entry, maker)
            for entry, maker in zip(manifest.entries, made, strict=True)
            if self._random.random() < self._config.audit.share
        ]
        for weights in sorted({version for each in chosen for version in each.versions}):
            self._compare(weights, [each for each in chosen if weights in each.versions])
        add_batch(self._config.run.folder, manifest.step, made)
        findings = [self._finding(each) for each in chosen]
        missed = max(0, manifest.step - before.step - 1) if before.step else 0
        if self._run.audits.record(before, AuditPosition.of(manifest), findings, missed=missed):
            self._act(manifest.step, findings)
        return True

    def _next_batch(self, before: AuditPosition) -> Manifest | None:
        """Return the oldest batch behind a position that still has its record."""
        found = None
        for step in range(self._run.ledger.steps().taken, 0, -1):
            manifest = self._run.ledger.manifest(step)
            if manifest is None or not before.precedes(AuditPosition.of(manifest)):
                break
            found = manifest
            if not before.step:
                break
        return found

    def _makers(self, manifest: Manifest) -> list[MadeGroup]:
        """Return who made each group; "" if several workers may have, as for continued groups."""
        reads = [("HMGET", self._run.keys.group(gid), *_FIELDS) for gid in manifest.gids]
        made = []
        for entry, record in zip(
            manifest.entries, self._run.store.each("makers", reads, "control"), strict=True
        ):
            owner, payload, continued, lineage, version = map(_text, record)
            is_known = payload == entry.payload.token and not continued and NAME.fullmatch(owner)
            worker = owner if is_known else ""
            made.append(MadeGroup(manifest.step, entry.gid, worker, f"{lineage}:{version}"))
        return made

    def _read(self, entry: ManifestEntry, made: MadeGroup) -> _Chosen:
        chosen = _Chosen(made)
        try:
            chosen.group = self._run.buffer.read(entry.payload)
            if self._run.payloads.keyring:  # a record can be forged, a signature cannot
                names = signers(chosen.group.signatures)
                chosen.made = made._replace(worker=names[0] if len(names) == 1 else "")
            check_auditable(chosen.group)
        except (WireError, PayloadMissing) as error:
            chosen.problem = str(error)
        if not chosen.made.worker:
            chosen.problem = "no single worker is known to have made it"
        return chosen

    def _compare(self, weights: PolicyVersion, chosen: Sequence[_Chosen]) -> None:
        for each in chosen:
            assert each.group
            try:
                learner = self._weights.load(weights)
                each.difference += compare(learner, weights, each.group)
            except (ModelError, WireError, OSError) as error:
                each.problem = str(error)

    def _finding(self, chosen: _Chosen) -> AuditFinding:
        _, gid, worker, _ = chosen.made
        if chosen.problem or not chosen.group:
            return AuditFinding("impossible", worker, gid, chosen.problem)
        found = chosen.difference
        tolerance = self._config.audit.tolerance
        names = ", ".join(map(str, sorted(versions_of(chosen.group))))
        detail = (
            f"its logprobs are {found.rms:.3g} nats from those of the weights {names} (root mean "
            f"square of {found.tokens} tokens; [audit] tolerance is {tolerance:g})"
        )
        return AuditFinding("differs" if found.rms > tolerance else "agrees", worker, gid, detail)

    def _act(self, step: int, findings: Sequence[AuditFinding]) -> None:
        for verdict, worker, gid, detail in findings:
            level = logging.INFO if verdict == "agrees" else logging.WARNING
            facts = {"gid": gid, "worker": worker, "step": step, "verdict": verdict}
            log.log(level, "audit: %s", detail, extra=facts)
        for worker in {each.worker for each in findings if each.verdict == "differs"}:
            self._run.fleet.fence(worker)


def _text(value: bytes | None) -> str:
    # workers can write records
    return (value or b"").decode(errors="replace")


def _problems(config: TrainingConfig) -> Iterator[str]:
    if config.learner.lora:
        yield "[learner.lora] publishes adapters, and an audit loads whole weights"
    if config.learner.allow_truncated_sampling:
        yield (
            "with [learner] allow_truncated_sampling, logprobs are of another distribution than "
            "the model's"
        )
    if not config.has_model:
        yield "the simulated engine has no model, and makes its logprobs up"
