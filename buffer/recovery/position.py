"""Where the training of a run stands, as a checkpoint remembers it: all that a server may forget (I6)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from buffer.manifest import Manifest
from buffer.recovery.draw_set import TrainedDraws


class Position(BaseModel):
    """Keep it in every checkpoint (it is JSON), and hand it to `RolloutConsumer.open`: a server that lost its last
    second, or everything, is told again what was trained."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """the last train step that is in the weights"""
    lineage: str = ""
    """of the weights"""
    run: str = ""
    run_nonce: str = ""
    cursors: dict[str, int] = {}
    """next draw of each task when this was written"""
    batches: dict[int, list[str]] = {}
    """manifests, as lines, of the steps since the oldest checkpoint that is kept"""
    trained: TrainedDraws = TrainedDraws()

    def add(self, manifest: Manifest) -> None:
        """A batch was trained. AccountError, and nothing changed, if one of its groups was trained before."""
        self.trained.add_batch(manifest.step, manifest.gids)
        self.batches[manifest.step] = manifest.lines
        self.step = manifest.step

    def forget(self, keep: int) -> None:
        """`keep` is the oldest checkpoint that is kept: batches up to it are never delivered again."""
        self.batches = {step: lines for step, lines in self.batches.items() if step > keep}

    @property
    def kept(self) -> set[str]:
        """The groups of the steps since the oldest checkpoint kept."""
        return {line.partition(" ")[0] for _, *lines in self.batches.values() for line in lines}

    def manifest(self, step: int) -> Manifest | None:
        """What was trained in a step since the oldest checkpoint kept."""
        lines = self.batches.get(step)
        return Manifest.parse(step, lines) if lines else None
