"""The interface of an inference engine. Each token of a result names its weights (I9)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ModelError, RolloutMQError
from buffer.wire.rollout import MediaRef, PolicyVersion, VersionSpan
from buffer.wire.sampling import SampleParams
from producer_workers.images import ImageFolder

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "keep"]


class EngineError(ModelError):
    """The engine could not load its model, or cannot do what was asked in its present state."""


class EngineDeadError(EngineError):
    """The engine stopped for good; only a new engine helps."""


class WeightsError(ModelError):
    """New weights were refused. The engine still runs the old ones."""


class GenerationError(RolloutMQError):
    """One request failed or was refused; the engine continues with others."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request. Its logprobs are natural, after temperature and top-p."""

    token_ids: NDArray[np.int32]  # [n], with the stop token
    logprobs: NDArray[np.float32]  # [n]
    spans: tuple[VersionSpan, ...]  # cover [0, n) in order, none of length 0
    finish_reason: FinishReason
    # what was recorded beside, by the name of a column (`RolloutState.append`); None: nothing
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampling_mask(self) -> Any:
        """Return the tokens that each was sampled from, for agent loops that pass it by name."""
        return self.columns.get("sampling_mask")


@dataclass(frozen=True, slots=True)
class Scores:
    """The natural logprobs of given tokens at temperature 1, and the `k` most probable tokens."""

    logprobs: NDArray[np.float32]  # [n]
    top_ids: NDArray[np.int32]  # [n, k], the most probable first
    top_logprobs: NDArray[np.float32]  # [n, k]


@dataclass(slots=True, eq=False)
class Tally:
    """How many tokens an engine has sampled for a request so far, with those that it discards."""

    tokens: int = 0


TALLY: ContextVar[Tally] = ContextVar("TALLY")
"""That of the request of the current call of `Engine.generate`.

An engine that adds to it has its tokens counted while they are sampled, and those of requests that
are cancelled or fail; what it returns is counted anyway.
"""


class GrowingResponse:
    """The response of one request so far. `finish_reason` is None until it has ended."""

    def __init__(self) -> None:
        self._tally = TALLY.get(Tally())
        self.finish_reason: FinishReason | None = None
        self.forget()

    def forget(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []

    def add(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        before = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self._tally.tokens += len(self.token_ids) - before
        self._logprobs.extend(logprobs)

    def stamp(self, version: PolicyVersion) -> None:
        """Record that `version` made the tokens since the last stamp; extend its span if it can."""
        start = self._spans[-1].start + self._spans[-1].length if self._spans else 0
        if start == len(self.token_ids):
            return
        if self._spans and (self._spans[-1].lineage, self._spans[-1].version) == version:
            start = self._spans.pop().start
        length = len(self.token_ids) - start
        self._spans.append(VersionSpan(start, length, version.version, version.lineage))

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = self.finish_reason or reason

    def generation(self) -> Generation:
        assert self.finish_reason is not None
        token_ids = np.asarray(self.token_ids, dtype="<i4")
        logprobs = np.asarray(self._logprobs, dtype="<f4")
        spans = tuple(self._spans)
        return Generation(token_ids, logprobs, spans, self.finish_reason, self.columns())

    def columns(self) -> dict[str, Any]:
        return {}


class Engine(Protocol):
    """One model on one device or several. All methods run on the event loop that called `start`."""

    name: str

    async def start(self) -> None:
        """Load the model. Raises EngineError."""

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        """Sample one response to int32[P] prompt ids. Raises GenerationError or EngineDeadError.

        After `pause("abort")`, it returns the tokens so far with finish_reason "abort". While the
        engine is paused, new requests wait for `resume`. Cancelling the calling task aborts the
        request.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling: running calls return what they have, or ("keep") wait for `resume`."""

    async def resume(self) -> None: ...

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Switch to the safetensors in the folder `path`. Raises WeightsError or EngineDeadError.

        It returns once every part of the engine has switched and no cache of the old weights is
        left. Running requests continue; an engine that cannot tell versions apart aborts them.
        After a WeightsError, the engine runs the old weights.
        """

    async def sleep(self) -> None:
        """Free the device's memory, while no request runs. Raises EngineError if it cannot."""

    async def wake(self) -> None:
        """Take the memory back, with the same weights."""

    def version(self) -> PolicyVersion: ...

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead."""

    async def shutdown(self) -> None:
        """Abort running requests and end every process of the engine. May be called twice."""


def context_length(engine: object) -> int | None:
    """Return how many tokens prompt and response may have together; None if unknown."""
    return getattr(engine, "max_model_len", None)


def structures(engine: object) -> bool:
    """Return whether `engine` applies `SampleParams.structured`; if not, such tasks are refused."""
    return bool(getattr(engine, "structures_output", False))


def records_masks(engine: object) -> bool:
    """Return whether generations have a `sampling_mask` where something was cut off."""
    return bool(getattr(engine, "records_masks", False))


@runtime_checkable
class ScoresTexts(Protocol):
    """An engine that can score given tokens."""

    async def score(
        self, request_id: str, ids: NDArray[np.int32], start: int, top_k: int = 0
    ) -> Scores:
        """Return the scores of `ids[start:]`, each after all ids before it; `start` is at least 1.

        Neither temperature nor top-p apply. Raises GenerationError, also after `pause("abort")`, or
        EngineDeadError. Other requests run meanwhile.
        """


@runtime_checkable
class AbortsGroups(Protocol):
    """An engine that can abort some requests without a pause; else protected groups prevent it."""

    async def abort_others(self, spared: Collection[str]) -> None:
        """Abort requests whose group (their id up to the first "/") is not in `spared`."""


class GroupImages:
    """Images of groups; an engine without a model ignores them."""

    def read_from(self, folder: ImageFolder) -> None: ...

    def show(self, gid: str, refs: Sequence[MediaRef]) -> None:
        """Show these images to requests of the group from now on, in the order of its prompt.

        The group of a request is its id up to the first "/".
        """

    def forget(self, gid: str) -> None: ...


@runtime_checkable
class ShowsImages(Protocol):
    """An engine that can show images to its model. Without it, groups with images are refused."""

    images: GroupImages


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Running requests, requests that wait for a slot, and the used share of the KV cache."""

    running: int
    waiting: int
    kv_usage: float


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that reports how full it is, which `concurrency = "auto"` needs."""

    def load(self) -> EngineLoad | None:
        """Return the load after its last step; None before the first, or if reporting is off."""
