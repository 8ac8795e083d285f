"""A trainer without a model: its weights are a chain of hashes over all that it consumed, in order.

What it does with the queue is what `consumer.grpo.trainer` does, line by line; who has its last
checkpoint has proof of what was trained: the chain of each step names the one before, so a history
can be walked backwards from the end.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import threading
import time
from pathlib import Path

import numpy as np
import orjson
from safetensors.numpy import save_file

from buffer.ledger.position import Position
from buffer.manifest import Manifest, ManifestEntry
from buffer.observers import Observer
from buffer.run.run import Run
from buffer.weights import folder_manifest as weights_manifest
from buffer.wire.group import RolloutGroup
from consumer.handle.batch import Batch, Stopped
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.rollout_consumer import RolloutConsumer
from proofs.chaos.history import History
from proofs.chaos.plan import CHECKPOINT_EVERY, KEEP_CHECKPOINTS, SYNC_INTERVAL, Folders
from proofs.truth.witness import members_of

log = logging.getLogger("rolloutmq.chaos")

CHAIN = "chain.json"


class HeldMoment(Observer):
    """Holds the trainer in a moment of its step if a harness asks for it.

    The harness writes the moment into `hold`, which becomes `held` while the trainer waits there;
    removing that lets it go on.
    """

    def __init__(self, folders: Folders) -> None:
        self._hold, self._held = folders.root / "hold", folders.root / "held"

    def moment(self, name: str) -> None:
        if self._hold.exists() and self._hold.read_text() == name:
            self._hold.rename(self._held)
            while self._held.exists():
                time.sleep(0.01)

    def taken(self, manifest: Manifest, began_ns: int) -> None:
        self.moment("in take")


class LightTrainer:
    """Trains `run` until the file `folders.finish` is there."""

    def __init__(self, run: Run, folders: Folders, history: History) -> None:
        self._run = run
        self._folders = folders
        self._history = history
        self._checkpoints = CheckpointFolder(folders.checkpoints)
        self.consumer = RolloutConsumer(run)
        self._chain = ""
        self._held: Batch | None = None
        self._held_in = HeldMoment(folders)
        run.observers.append(self._held_in)

    def fit(self, *, take_over: bool, regenerate: bool) -> None:
        """From the newest checkpoint on. Raises RoleHeld, Fenced, LostRun, LedgerError."""
        self._load()
        opening = self.consumer.open(
            position=self._position, take_over=take_over, regenerate=regenerate
        )
        self._history.note(
            "opened",
            lineage=self.consumer.lineage,
            step=self._position.step,
            chain=self._chain,
            changed=bool(opening.recovery),
        )
        try:
            self._go_on()
            while not self._folders.finish.exists():
                self._step(self._position.step + 1)
            self._checkpoint()
            self._history.note("finished", step=self._position.step, chain=self._chain)
            self.consumer.finish()
        except Stopped:
            self._checkpoint()
        finally:
            self.consumer.close()

    def _load(self) -> None:
        steps = self._checkpoints.steps()
        if not steps:
            self._position = Position(run=self._run.name, run_nonce=self._run.nonce)
            return
        self._position = self._checkpoints.read(steps[-1])
        self._chain = orjson.loads((self._checkpoints.path(steps[-1]) / CHAIN).read_bytes())

    def _go_on(self) -> None:
        step = self._position.step
        self._checkpoints.clear(after=step)
        if step:
            self.consumer.commit(step, keep=self._checkpoints.steps()[0])
        self._publish()

    def _step(self, step: int) -> None:
        shares = self._run.limits.mix().shares(step)
        self._held_in.moment("before take")
        batch = self.consumer.take_batch(step, shares, checkpoint=self._make_room)
        self._note_delivery(batch)
        self._note_held(batch)
        self._held_in.moment("after take")
        if step % SYNC_INTERVAL == 1:
            self._interrupt()
        self._held_in.moment("in train")
        # a stop in between would leave a checkpoint of a step that was not trained
        self._position.add(batch.manifest)
        before = self._chain
        self._chain = _link(self._chain, step, batch.groups)
        self._history.note(
            "trained", step=step, before=before, after=self._chain, gids=batch.manifest.gids
        )
        self._held_in.moment("after train")
        if step % SYNC_INTERVAL == 0:
            self._publish()
            self._held_in.moment("after publish")
        if step % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def _note_delivery(self, batch: Batch) -> None:
        groups = [
            _facts(entry, group)
            for entry, group in zip(batch.manifest.entries, batch.groups, strict=True)
        ]
        self._history.note(
            "delivered", step=batch.step, lineage=self.consumer.lineage, groups=groups
        )

    def _note_held(self, batch: Batch) -> None:
        """Look at the batch before, which was kept while this one was read."""
        if self._held:
            groups = [{"gid": group.gid, "digest": _digest(group)} for group in self._held.groups]
            self._history.note(
                "held", step=self._held.step, lineage=self.consumer.lineage, groups=groups
            )
        self._held = batch

    def _checkpoint(self) -> None:
        step = self._position.step
        if step in (0, *self._checkpoints.steps()[-1:]):
            return
        self.consumer.check_role()
        self._position.forget(self._checkpoints.oldest_with(step, KEEP_CHECKPOINTS))
        self.consumer.note_draws(self._position)
        self._checkpoints.write(self._position, self._save)
        self._held_in.moment("after checkpoint")
        self._history.note("checkpoint", step=step, chain=self._chain)
        self.consumer.commit(step, keep=self._checkpoints.prune(KEEP_CHECKPOINTS))
        self._held_in.moment("after commit")

    def _save(self, folder: Path) -> None:
        (folder / CHAIN).write_bytes(orjson.dumps(self._chain))
        self._held_in.moment("in checkpoint")

    def _make_room(self) -> None:
        newest = self._checkpoints.steps()[-1:]
        if [self._position.step] > newest:
            self._checkpoint()
        elif newest:
            self.consumer.commit(newest[0], keep=self._checkpoints.prune(1))

    def _interrupt(self) -> None:
        """Abort what is sampled since the newest weights came; it is resumed."""
        with self.consumer.paused("abort"):
            pass

    def _publish(self) -> None:
        """Name new weights around a pause, as a trainer with devices of its own does."""
        step = self._position.step
        folder = self._folders.weights / f"{self.consumer.lineage}-{step:06d}"
        folder.mkdir(exist_ok=True)
        save_file({"w": np.full(8, step, dtype=np.float32)}, folder / "model.safetensors")
        checksum = weights_manifest.write(folder, f"{self.consumer.lineage}:{step}")
        with self.consumer.paused("keep"):
            self._held_in.moment("in publish")
            self.consumer.publish_weights(step, str(folder), checksum)


def _link(chain: str, step: int, groups: list[RolloutGroup]) -> str:
    """The weights after a step."""
    return hashlib.sha256(f"{chain} {step} {' '.join(map(_digest, groups))}".encode()).hexdigest()[
        :24
    ]


def _digest(group: RolloutGroup) -> str:
    """Of everything that a gradient would depend on."""
    digest = hashlib.sha256(group.gid.encode())
    for column in (
        group.prompt_ids,
        group.response_ids,
        group.logprobs,
        group.lengths,
        group.mask,
        group.scores,
    ):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()[:24]


def _facts(entry: ManifestEntry, group: RolloutGroup) -> dict[str, object]:
    """What the checker is told of one group of a batch."""
    spans = {span[2:] for state in group.states for span in state.spans}
    return {
        "gid": entry.gid,
        "token": entry.payload.token,
        "crc": entry.payload.crc,
        "digest": _digest(group),
        "row": group.shared.extra["row"],
        "truth": group.shared.ground_truth,
        "made_by": sorted([lineage, version] for version, lineage in spans),
        "members": [*members_of(group)],
    }


def stop_on_signal(trainer: LightTrainer) -> None:
    """The first signal asks for a checkpoint and an end; a second one ends at once."""

    def stop(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        trainer.consumer.stop()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
