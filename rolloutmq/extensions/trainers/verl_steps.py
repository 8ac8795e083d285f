"""The steps of verl's trainer as steps of a run: which samples each gets, and which are trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer.control.control import Mode
from buffer.errors import ConfigError, LedgerError
from buffer.ids import new_nonce
from buffer.ledger.position import Position
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.redis.whole_file import replace_file
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion
from consumer.handle.rollout_consumer import Batch, RolloutConsumer, Stopped

TASK = "verl"
VALIDATION = "validation"
UNBOUNDED = 10**9
"""Limits without an effect: verl's rollouter bounds the age and the number of samples itself."""


@dataclass(frozen=True)
class MessageQueue:
    """Replaces verl's actor of this name: what its clients, in other processes, know of the run."""

    server: str
    run: str
    job: str
    max_queue_size: int
    required: int  # samples of a trainer's step
    sync: int  # steps of a version of the weights
    checkpoints: Path
    resume_from: str | None  # a checkpoint; "": none; None: the newest

    @classmethod
    def remote(cls, config: Any, max_queue_size: int) -> MessageQueue:
        """Create the run that verl's config names, or continue it. Raises ConfigError."""
        ours: Any = config.get("rolloutmq") or {}
        if not ours.get("server") or not ours.get("run"):
            raise ConfigError(
                "verl's config does not name a run",
                hint="add +rolloutmq.server=redis://host:6379/0 +rolloutmq.run=NAME",
            )
        trainer, training = config.trainer, config.async_training
        resumes = {"disable": "", "resume_path": trainer.resume_from_path}
        queue = cls(
            server=ours.server,
            run=ours.run,
            job=new_nonce(),
            max_queue_size=int(max_queue_size),
            required=config.actor_rollout_ref.actor.ppo_mini_batch_size * training.require_batches,
            sync=training.trigger_parameter_sync_step,
            checkpoints=Path(trainer.default_local_dir).absolute(),
            resume_from=resumes.get(trainer.resume_mode),
        )
        queue._create(config.rollout.total_rollout_steps)
        return queue

    def _create(self, samples: int | None) -> None:
        nonce = self._file("nonce")
        if not nonce.exists():
            nonce.parent.mkdir(parents=True, exist_ok=True)
            nonce.write_text(new_nonce(), encoding="utf-8")
        limits = RunLimits(
            steps=samples // self.required if samples else UNBOUNDED,
            batch_size=self.required,
            order="fifo",
            stale_threshold=UNBOUNDED,
            tasks={TASK: TaskLimits(), VALIDATION: TaskLimits(weight=0)},
        )
        run = Run.create(Store(self.server), self.run, nonce.read_text(encoding="utf-8"), limits)
        run.control.open_producer(self.job, take_over=True)
        # the job before may have ended the run
        run.control.set_mode("operator", Mode.RUN)

    def open(self) -> Run:
        return Run.open(Store(self.server), self.run)

    def newest_step(self) -> int:
        """Return the last step in verl's newest checkpoint; 0 without one."""
        file = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(file.read_text(encoding="utf-8")) * self.sync if file.exists() else 0

    def read_position(self) -> Position:
        """Return the position of the checkpoint that verl starts from. Raises ConfigError."""
        step = self.newest_step()
        if self.resume_from is not None:
            step = int(self.resume_from.rpartition("global_step_")[2] or 0) * self.sync
        file = self._file(f"position_{step}.json")
        if not step:
            return Position()
        if not file.exists():
            raise ConfigError(
                f"verl continues after step {step}, and {file} is missing: its checkpoint was not "
                "trained from this run",
                hint="choose another trainer.default_local_dir and another rolloutmq.run",
            )
        return Position.model_validate_json(file.read_bytes())

    def write_position(self, position: Position) -> None:
        """Write the position for the checkpoint that verl may make after this step."""
        if position.step % self.sync == 0:
            file = self._file(f"position_{position.step}.json")
            replace_file(file, position.model_dump_json().encode())

    def forget_positions(self, keep: int) -> None:
        """Remove those of the steps before `keep`."""
        for file in self._file("").glob("position_*.json"):
            if int(file.stem.partition("_")[2]) < keep:
                file.unlink()

    def _file(self, name: str) -> Path:
        return self.checkpoints / "rolloutmq" / name


class TrainerSteps:
    """Takes the batches of verl's steps, and commits those that its checkpoints contain."""

    def __init__(self, run: Run, queue: MessageQueue) -> None:
        self._run = run
        self._queue = queue
        self._position = queue.read_position()
        self._committed = self._position.step
        self._consumer = RolloutConsumer(run)
        # verl's rollouter is no producer of the run
        self._consumer.producer_timeout_s = None
        # a job has one trainer, and one that was killed counts as alive for some seconds
        self._consumer.open(position=self._position, take_over=True)

    def take(self) -> list[RolloutGroup]:
        """Wait for the groups of the next step, and return them; [] once the rollouter has ended.

        Raises LedgerError if a group of the step could not be read, and none replaces it.
        """
        saved = self._queue.newest_step()
        if self._committed < saved <= self._position.step:
            # verl has a newer checkpoint: the batches before the last one are freed
            self._consumer.commit(saved, keep=self._committed)
            self._position.forget(self._committed)
            self._queue.forget_positions(self._committed)
            self._committed = saved
        step = self._position.step + 1
        if self._position.step % self._queue.sync == 0:
            # verl has sent these weights; the run needs their name, to which samples refer
            weights = PolicyVersion(self._consumer.lineage, self._position.step)
            self._run.control.publish_weights(self._consumer.nonce, weights, "verl", "-")
        batch = self._wait(step)
        if batch is None:
            return []
        if len(batch.groups) != self._queue.required:
            raise LedgerError(
                f"step {step} has {len(batch.groups)} of {self._queue.required} samples",
                hint="see `rolloutmq logs events` for the groups that were quarantined",
            )
        self._position.add(batch.manifest)
        self._queue.write_position(self._position)
        return batch.groups

    def _wait(self, step: int) -> Batch | None:
        counts = {TASK: self._queue.required}
        try:
            return self._consumer.take_batch(step, counts)
        except Stopped:
            pass
        try:
            # the last samples may have come between its last look and the end
            return self._consumer.take_batch(step, counts, deadline_s=0)
        except (TimeoutError, Stopped):
            return None

    def close(self) -> None:
        self._consumer.close()
