"""What a rollout worker asks of an inference engine: token ids in; token ids, logprobs and versions out.

Invariant: every token of a `Generation` lies in exactly one span, and that span names the weights which
made the token (design I9). One suite, `tests/engines/conformance.py`, holds every engine to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ModelError, RolloutMQError
from buffer.rollout import PolicyVersion, SampleParams, VersionSpan

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "keep"]


class EngineError(ModelError):
    """The engine could not load its model, or was asked something in a state where it cannot answer."""


class EngineDeadError(EngineError):
    """The engine stopped for good; only a new engine helps."""


class WeightsError(ModelError):
    """New weights were refused. The engine still runs the old ones."""


class GenerationError(RolloutMQError):
    """One request failed or was refused; the engine goes on with the others."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request made.

    token_ids: int32[n], a stop token included. logprobs: float32[n], natural log, of each token as it was
    sampled (temperature and top-p applied). spans: cover [0, n) in order, none of length 0. routed_experts:
    int16[P + n - 1, layers, top_k], the choices for every token of prompt and response but the last, where the engine
    records them and made a token.
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

    async def generate(self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams) -> Generation:
        """Sample one response to int32[P] prompt ids.

        Aborted by `pause("abort")`: returns the tokens made so far with finish_reason "abort". Cancelling the
        calling task aborts the request. While paused, new requests wait for `resume`.
        Raises GenerationError (this request only) or EngineDeadError.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. "abort": running calls return what they have; "keep": they freeze until `resume`."""

    async def resume(self) -> None:
        """Sample again. Does nothing where the engine is not paused."""

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Switch to the safetensors in the folder `path`, in place.

        Returns once every part of the engine has switched and no cache of the old weights is left. Running
        requests go on under the new weights, except where the engine cannot tell the versions apart: there
        they are aborted. Raises WeightsError and keeps the old weights, or EngineDeadError.
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
