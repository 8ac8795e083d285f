"""One rollout: what a worker makes of one prompt once, and what a trainer needs of it.

Token columns are numpy arrays, never lists: a group of 8 x 2,048 tokens packs in microseconds that way.
Field names are XTuner's where the thing is the same; `DECISIONS.md` maps the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from buffer.errors import WireError


class Status(StrEnum):
    """What became of a rollout, or of a group (`group_status`)."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


class PolicyVersion(NamedTuple):
    """Which weights: the train step M they were published after, in one lineage of weights."""

    lineage: str
    version: int

    def __str__(self) -> str:
        return f"{self.lineage}:{self.version}"

    @classmethod
    def parse(cls, label: str) -> PolicyVersion:
        """Inverse of `str`. Raises ValueError for anything else."""
        lineage, _, version = label.rpartition(":")
        return cls(lineage, int(version))


class VersionSpan(NamedTuple):
    """Tokens [start, start + length) of a response were made by the weights (lineage, version) (I9)."""

    start: int
    length: int
    version: int
    lineage: str


def _column(dtype: str) -> BeforeValidator:
    def convert(value: Any) -> Any:
        return None if value is None else np.ascontiguousarray(value, dtype=dtype)

    return BeforeValidator(convert)


Int32 = Annotated[NDArray[np.int32], _column("<i4")]
Float32 = Annotated[NDArray[np.float32], _column("<f4")]
Mask = Annotated[NDArray[np.uint8], _column("u1")]


def no_tokens() -> NDArray[np.int32]:
    return np.empty(0, dtype="<i4")


def no_logprobs() -> NDArray[np.float32]:
    return np.empty(0, dtype="<f4")


class SampleParams(BaseModel):
    """How to sample. Defaults are XTuner's; 0 switches `top_k` off."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(2048, ge=1)
    min_tokens: int = Field(0, ge=0)
    stops: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class RolloutState(BaseModel):
    """One of the `prompt_repeat_k` rollouts of a prompt.

    Columns over response tokens have one length R: `response_ids`, `logprobs` (of the sampled tokens, at
    the sampling temperature), `response_mask` (1 = trained; None = all ones). `spans` say which weights
    made which tokens; tokens without a span were not sampled (a tool's, say).
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: int = Field(0, ge=0, description="place in its group")
    messages: list[dict[str, Any]] = []
    prompt_ids: Int32 | None = None
    response: str = ""
    response_ids: Int32 = Field(default_factory=no_tokens)
    logprobs: Float32 = Field(default_factory=no_logprobs)
    response_mask: Mask | None = None
    spans: list[VersionSpan] = []
    reward: dict[str, float] | None = None
    finish_reason: str | None = None
    status: Status = Status.INIT
    error: str | None = None
    sample_params: SampleParams = SampleParams()
    data_source: str | None = None
    ground_truth: Any = None
    extra: dict[str, Any] = {}

    @model_validator(mode="after")
    def _columns_agree(self) -> RolloutState:
        tokens = len(self.response_ids)
        if len(self.logprobs) != tokens:
            raise ValueError(f"logprobs has {len(self.logprobs)} values for {tokens} response_ids")
        if self.response_mask is not None and len(self.response_mask) != tokens:
            raise ValueError(f"response_mask has {len(self.response_mask)} values for {tokens} response_ids")
        if any(s.start < 0 or s.length < 0 or s.start + s.length > tokens for s in self.spans):
            raise ValueError(f"a version span lies outside of the {tokens} response tokens")
        return self

    def oldest_version(self) -> int | None:
        """The oldest policy version M among the tokens; None where no token was sampled."""
        return min((s.version for s in self.spans if s.length), default=None)

    def append(
        self,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        spans: Iterable[VersionSpan],
    ) -> None:
        """Add newly sampled tokens behind the ones that are there (partial rollout)."""
        done = len(self.response_ids)
        self.response_ids = np.concatenate([self.response_ids, token_ids]).astype("<i4", copy=False)
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype("<f4", copy=False)
        if self.response_mask is not None:
            self.response_mask = np.concatenate([self.response_mask, np.ones(len(token_ids), "u1")])
        self.spans = [*self.spans, *(s._replace(start=s.start + done) for s in spans if s.length)]

    def reset_response(self) -> None:
        """Forget what was generated: the prompt, its ids and the answer key stay."""
        self.response, self.response_ids, self.logprobs = "", no_tokens(), no_logprobs()
        self.response_mask, self.spans, self.reward = None, [], None
        self.finish_reason, self.error, self.status = None, None, Status.INIT


PRECEDENCE = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED, Status.INIT)


def group_status(statuses: Iterable[Status | str]) -> Status:
    """The status of a group from those of its members: the first of `PRECEDENCE` that one has, else COMPLETED.

    Unlike the reference, where a group of INIT members counts as COMPLETED by accident, here it is INIT,
    and a group without members is an error: neither can ever be trained.
    """
    held = {Status(status) for status in statuses}
    if not held:
        raise WireError("a group has no rollouts", hint="every group holds prompt_repeat_k of them")
    return next((status for status in PRECEDENCE if status in held), Status.COMPLETED)
