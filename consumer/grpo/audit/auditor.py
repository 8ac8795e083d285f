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
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer.errors import ConfigError, ModelError, PayloadMissing, WireError
from buffer.ids import NAME
from buffer.ledger.audits import AuditFinding, AuditPosition
from buffer.model.manifest import Manifest, ManifestEntry
from buffer.run import Run
from buffer.weights.receiver import WeightsReceiver, find_version
from buffer.wire.framing import signers
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion
from consumer.config.learner import LearnerConfig
from consumer.config.training import TrainingConfig
from consumer.grpo.audit.audit_log import MadeGroup, add_batch
from consumer.grpo.audit.difference import (
    NOTHING,
    Difference,
    check_auditable,
    compare,
    versions_of,
)
from consumer.grpo.learner.learner import Learner
from consumer.handle.ranks import ALONE, select_device


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
                f"the weights {weights} are not kept any more",
                hint="raise [trainer] keep_weights",
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
