"""What a rollout worker asks of an inference engine: token ids in; token ids, logprobs and versions
out.

Invariant: every token of a `Generation` lies in exactly one span, and that span names the weights
which made the token (design I9). One suite, `tests/producer_workers/engines/conformance.py`, holds
every engine to it.

What an engine may do beyond `Engine`. One that cannot is worked around, so yours need not.

The images of a group while it is worked on: its requests are known by its gid, so any agent loop is
served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ModelError, RolloutMQError
from buffer.model.rollout import MediaRef, PolicyVersion, SampleParams, VersionSpan
from buffer.weights.announcement import Announcement
from producer_workers.images.image_reader import ImageReader

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "keep"]


class EngineError(ModelError):
    """The engine could not load its model, or was asked something in a state where it cannot
    answer.
    """


class EngineDeadError(EngineError):
    """The engine stopped for good; only a new engine helps."""


class WeightsError(ModelError):
    """New weights were refused. The engine still runs the old ones."""


class GenerationError(RolloutMQError):
    """One request failed or was refused; the engine goes on with the others."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request made.

    token_ids: int32[n], a stop token included. logprobs: float32[n], natural log, of each token as
    it was sampled (temperature and top-p applied). spans: cover [0, n) in order, none of length 0.
    routed_experts: int16[P + n - 1, layers, top_k], the choices for every token of prompt and
    response but the last, where the engine records them and made a token.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routed_experts: NDArray[np.int16] | None = None


class Engine(Protocol):
    """One model in one place. All methods run on the event loop that called `start`."""

    name: str

    async def start(self) -> None:
        """Load the model. Raises EngineError."""

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        """Sample one response to int32[P] prompt ids.

        Aborted by `pause("abort")`: returns the tokens made so far with finish_reason "abort".
        Cancelling the calling task aborts the request. While paused, new requests wait for
        `resume`. Raises GenerationError (this request only) or EngineDeadError.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. "abort": running calls return what they have; "keep": they freeze until
        `resume`.
        """

    async def resume(self) -> None:
        """Sample again. Does nothing where the engine is not paused."""

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Switch to the safetensors in the folder `path`, in place.

        Returns once every part of the engine has switched and no cache of the old weights is left.
        Running requests go on under the new weights, except where the engine cannot tell the
        versions apart: there they are aborted. Raises WeightsError and keeps the old weights, or
        EngineDeadError.
        """

    async def sleep(self) -> None:
        """Give the device's memory back, while no request runs. Raises EngineError where it cannot."""

    async def wake(self) -> None:
        """Take it again. The weights are those from before, until newer ones are loaded."""

    def version(self) -> PolicyVersion:
        """The weights that the engine acknowledged."""

    def check_health(self) -> None:
        """Raises EngineDeadError where the engine is gone."""

    async def shutdown(self) -> None:
        """Abort what runs and end every process of the engine. May be called twice."""


@runtime_checkable
class StructuresOutput(Protocol):
    """Whether it keeps a response to `SampleParams.structured`. Without it, who asks for that is
    refused: a task at the start, a group when it asks.
    """

    structures_output: bool


def structures(engine: object) -> bool:
    """Whether `engine` keeps responses to a structure."""
    return isinstance(engine, StructuresOutput) and engine.structures_output


@runtime_checkable
class AbortsSome(Protocol):
    """It can end some requests and go on with the others. Without it, nothing is aborted while a
    group is protected.
    """

    async def abort_others(self, spared: Collection[str]) -> None:
        """Requests of all groups but `spared` return what they have, with finish_reason "abort".
        The group of a request is what stands before the first "/" of its id. May be called again
        and again; the engine is not paused by it.
        """


@runtime_checkable
class ReceivesWeights(Protocol):
    """The engine can receive weights from the trainer's memory. Without it, it reads their folder."""

    def receives_weights(self) -> bool:
        """Return whether it can, as it was started."""

    async def receive_weights(self, announced: Announcement, version: PolicyVersion) -> None:
        """Do as `Engine.load_weights`. A transfer that fails never touches the model."""


class GroupImages(Protocol):
    """What requests see beside their tokens, by the group that stands before the first "/" of their
    ids.
    """

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
    """Requests that are sampled, requests that wait for a place, and the share of the KV cache that
    is in use.
    """

    running: int
    waiting: int
    kv_usage: float


@runtime_checkable
class TellsLoad(Protocol):
    """It knows how full it is, which `concurrency = "auto"` needs."""

    def load(self) -> EngineLoad | None:
        """As of its last step; None where nobody told it to look, or before the first."""


@contextmanager
def shown(engine: Engine, gid: str, media: Sequence[MediaRef]) -> Iterator[None]:
    """Meanwhile the requests of group `gid` see `media`. Raises GenerationError where the engine
    shows none.
    """
    if not media:
        yield
        return
    if not isinstance(engine, SeesImages):
        hint = "use [engine] kind vllm, or leave such tasks out of [worker] tasks"
        raise GenerationError(
            f"{gid} has images, and the engine {engine.name} can show none", hint=hint
        )
    engine.images.show(gid, media)
    try:
        yield
    finally:
        engine.images.forget(gid)


class Unseen:
    """The images of an engine without a model, which looks at no prompt either."""

    def read_with(self, reader: ImageReader) -> None:
        pass

    def show(self, gid: str, media: Sequence[MediaRef]) -> None:
        pass

    def forget(self, gid: str) -> None:
        pass
