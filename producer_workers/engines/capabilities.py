"""What an engine may do beyond `Engine`. One that cannot is worked around, so yours need not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from buffer.rollout import MediaRef, PolicyVersion
from buffer.weights.announcement import Announcement
from producer_workers.images.image_reader import ImageReader


@runtime_checkable
class StructuresOutput(Protocol):
    """Whether it keeps a response to `SampleParams.structured`. Without it, who asks for that is refused: a task at the
    start, a group when it asks."""

    structures_output: bool


def structures(engine: object) -> bool:
    """Whether `engine` keeps responses to a structure."""
    return isinstance(engine, StructuresOutput) and engine.structures_output


@runtime_checkable
class AbortsSome(Protocol):
    """It can end some requests and go on with the others. Without it, nothing is aborted while a group is protected."""

    async def abort_others(self, spared: Collection[str]) -> None:
        """Requests of all groups but `spared` return what they have, with finish_reason "abort". The group of a request
        is what stands before the first "/" of its id. May be called again and again; the engine is not paused by it."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """The engine can receive weights from the trainer's memory. Without it, it reads their folder."""

    def receives_weights(self) -> bool:
        """Return whether it can, as it was started."""

    async def receive_weights(self, announced: Announcement, version: PolicyVersion) -> None:
        """Do as `Engine.load_weights`. A transfer that fails never touches the model."""


class GroupImages(Protocol):
    """What requests see beside their tokens, by the group that stands before the first "/" of their ids."""

    def read_with(self, reader: ImageReader) -> None:
        """What reads them, before the first is shown."""

    def show(self, gid: str, media: Sequence[MediaRef]) -> None:
        """From now on requests of that group see these, in the order in which its prompt has them."""

    def forget(self, gid: str) -> None:
        """No request of that group will come any more."""


@runtime_checkable
class SeesImages(Protocol):
    """It can show images to its model. Without it, groups that have some are refused."""

    images: GroupImages


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests that are sampled, requests that wait for a place, and the share of the KV cache that is in use."""

    running: int
    waiting: int
    kv_usage: float


@runtime_checkable
class TellsLoad(Protocol):
    """It knows how full it is, which `concurrency = "auto"` needs."""

    def load(self) -> EngineLoad | None:
        """As of its last step; None where nobody told it to look, or before the first."""
