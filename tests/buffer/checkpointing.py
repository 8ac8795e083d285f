"""A trainer that writes checkpoints, on a server that can be put back to an earlier moment."""

from __future__ import annotations

from typing import Any

from buffer.ids import new_nonce
from buffer.ledger.ended_draws import note_draws
from buffer.ledger.position import Position
from buffer.ledger.trainer_opening import Opening
from buffer.manifest import Manifest
from tests.buffer.scene import Scene
from tests.buffer.time_machine import Moment, put_back, remember


class Trainer:
    """A trainer with checkpoints: `position` is what its newest one would hold, `checkpoints` what
    the old ones do.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.position = Position()
        self.checkpoints: dict[int, Position] = {}
        self.open()

    def open(self, position: Position | None = None, **options: Any) -> Opening:
        self.position = (position or self.position).model_copy(deep=True)
        nonce = new_nonce()
        opening = self.scene.run.trainers.open(
            nonce, lineage=nonce[:8], take_over=True, position=self.position, **options
        )
        self.scene.trainer = nonce
        return opening

    def train(self, step: int, **counts: int) -> Manifest:
        manifest = self.scene.take(step, True, **counts)
        self.position.add(manifest)
        return manifest

    def save(self, keep: int | None = None) -> Position:
        """A checkpoint of this step, and the commit; `keep`: the oldest one that stays."""
        step = self.position.step
        keep = step if keep is None else keep
        self.position.forget(keep)
        note_draws(self.scene.run.context, self.position)
        # through JSON, as on a disk
        self.checkpoints[step] = Position.model_validate_json(self.position.model_dump_json())
        self.scene.run.ledger.commit(self.scene.trainer, step, keep)
        return self.checkpoints[step]

    def now(self) -> Moment:
        return remember(self.scene.raw, self.scene.name)

    def lose_all_since(self, moment: Moment) -> None:
        put_back(self.scene.raw, self.scene.name, moment)
