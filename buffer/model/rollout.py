"""One rollout: what a worker makes of one prompt once, and what a trainer needs of it.

Token columns are numpy arrays, never lists: a group of 8 x 2,048 tokens packs in microseconds that
way. Field names are XTuner's where the thing is the same; `docs/pages/moving.md` maps the others.

What a response must look like, where the engine can keep the sampling to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from buffer.errors import WireError


class StructuredOutput(BaseModel):
    """One of: a JSON schema, a regular expression of the whole response, some texts of which it is
    one.

    Logprobs are those of the tokens that were allowed. A rollout that is interrupted starts again:
    no engine can go on in the middle of a structure.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: dict[str, Any] | None = Field(
        None, description="the response is JSON of this schema"
    )
    regex: str | None = Field(None, min_length=1, description="of the whole response")
    choice: list[str] | None = Field(None, min_length=1, description="the response is one of these")

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutput:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("structured output is one of json_schema, regex and choice")
        return self


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
    """Tokens [start, start + length) of a response were made by the weights (lineage, version)
    (I9).
    """

    start: int
    length: int
    version: int
    lineage: str


def as_column(value: Any, dtype: str) -> NDArray[Any]:
    """The value as a column of that type. ValueError where it is whole numbers that the type cannot
    hold: numpy would keep their last 32 bits.
    """
    raw = np.asarray(value)
    if raw.dtype == dtype or np.dtype(dtype).kind == "f":
        return np.ascontiguousarray(raw, dtype)
    try:
        with np.errstate(invalid="ignore"):
            column = np.ascontiguousarray(raw, dtype)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    if not np.array_equal(column, raw):
        raise ValueError(
            f"a value that {np.dtype(dtype).name} cannot hold: {raw[column != raw].flat[0]}"
        )
    return column


def _column(dtype: str) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else as_column(value, dtype))


Int32 = Annotated[NDArray[np.int32], _column("<i4")]
Float32 = Annotated[NDArray[np.float32], _column("<f4")]
Mask = Annotated[NDArray[np.uint8], _column("u1")]
Experts = Annotated[NDArray[np.int16], _column("<i2")]


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
    # made by a factory: pydantic copies other defaults, at four times the cost of the whole check
    stops: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    seed: int | None = None
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    structured: StructuredOutput | None = None


class ToolCall(BaseModel):
    """A call of a function that the model asked for. `arguments` is None where its text is no JSON
    object.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    name: str
    arguments: dict[str, Any] | None = None
    raw_arguments: str = ""


class MediaRef(BaseModel):
    """An image, video or sound of the prompt, by reference: `uri` says where its features are,
    never what.

    `tokens`: how many of the prompt it takes; `grid_thw`: patches in time, height and width, from
    which a trainer computes 3-D positions. The buffer never opens it; run://… is a file of its
    group (buffer/store/media_folder.py).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["image", "video", "audio"]
    uri: str = Field(min_length=1)
    tokens: int = Field(0, ge=0)
    grid_thw: (
        Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=3, max_length=3)] | None
    ) = None


class RolloutState(BaseModel):
    """One of the `prompt_repeat_k` rollouts of a prompt.

    Columns over response tokens have one length R: `response_ids`, `logprobs` (of the sampled
    tokens, at the sampling temperature), `response_mask` (1 = trained; None = all ones), and where
    somebody computed them `ref_logprobs` (of the reference model) and `values` (of a critic).
    `spans` say which weights made which tokens; tokens without a span were not sampled (a tool's,
    say).

    `routed_experts` of a mixture of experts: int16[P + R - 1, layers, top_k], the choices for every
    token but the last, or a text that says where they are. `messages`, `tools`, `tool_choice`,
    `multimodal`, `prompt_ids`, `data_source`, `ground_truth` and `extra` belong to the prompt and
    are the same in a whole group.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: int = Field(0, ge=0, description="place in its group")
    session_id: str | None = Field(None, description="turns of one session go to one engine")
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = Field(
        None, description="what the model may call, as JSON schemas"
    )
    tool_choice: str | dict[str, Any] | None = None
    multimodal: list[MediaRef] = []
    prompt_ids: Int32 | None = None
    response: str = ""
    tool_calls: list[ToolCall] = []
    response_ids: Int32 = Field(default_factory=no_tokens)
    logprobs: Float32 = Field(default_factory=no_logprobs)
    response_mask: Mask | None = None
    ref_logprobs: Float32 | None = None
    values: Float32 | None = None
    routed_experts: str | Experts | None = None
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
        for name in ("logprobs", "response_mask", "ref_logprobs", "values"):
            column = getattr(self, name)
            if column is not None and len(column) != tokens:
                raise ValueError(f"{name} has {len(column)} values for {tokens} response_ids")
        if any(s.start < 0 or s.length < 0 or s.start + s.length > tokens for s in self.spans):
            raise ValueError(f"a version span lies outside of the {tokens} response tokens")
        if isinstance(self.routed_experts, np.ndarray):
            self._check_experts(self.routed_experts)
        return self

    def _check_experts(self, experts: NDArray[np.int16]) -> None:
        rows = expert_rows(
            0 if self.prompt_ids is None else len(self.prompt_ids), len(self.response_ids)
        )
        if experts.ndim != 3 or len(experts) != rows:
            raise ValueError(
                f"routed_experts is {list(experts.shape)}, expected [{rows}, layers, top_k]"
            )

    def oldest_version(self) -> int | None:
        """The oldest policy version M among the tokens; None where no token was sampled."""
        return min((s.version for s in self.spans if s.length), default=None)

    def append(
        self,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        spans: Iterable[VersionSpan],
        *,
        routed_experts: NDArray[np.int16] | str | None = None,
    ) -> None:
        """Add newly sampled tokens behind the ones that are there (partial rollout).

        `routed_experts` is of the whole, old tokens included; rows that are there stay, being of
        the pass that sampled these tokens. Columns that do not cover the new tokens are forgotten.
        """
        done = len(self.response_ids)
        if len(token_ids):
            self.ref_logprobs = None
            self.values = None
            self.routed_experts = with_known_rows(self.routed_experts, routed_experts)
        self.response_ids = np.concatenate([self.response_ids, as_column(token_ids, "<i4")])
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype("<f4", copy=False)
        if self.response_mask is not None:
            self.response_mask = np.concatenate([self.response_mask, np.ones(len(token_ids), "u1")])
        self.spans = [*self.spans, *(s._replace(start=s.start + done) for s in spans if s.length)]

    def read(self, token_ids: NDArray[np.int32]) -> None:
        """Add tokens that the model reads and did not sample (a tool's, say): mask 0, logprob 0, no
        span.
        """
        mask = (
            np.ones(len(self.response_ids), "u1")
            if self.response_mask is None
            else self.response_mask
        )
        self.append(token_ids, np.zeros(len(token_ids), "<f4"), ())
        self.response_mask = np.concatenate([mask, np.zeros(len(token_ids), "u1")])

    def stamp(self, weights: PolicyVersion) -> int:
        """Say that the tokens behind the last span were made by `weights`; returns how many these
        are.

        For engines that do not stamp their tokens. What has a span keeps it (I9), so a resumed
        rollout gets several, and the oldest one counts.
        """
        start = max((span.start + span.length for span in self.spans), default=0)
        new = len(self.response_ids) - start
        if new > 0:
            self.spans = [*self.spans, VersionSpan(start, new, weights.version, weights.lineage)]
        return max(new, 0)

    def reset_response(self) -> None:
        """Forget what was generated, and start anew: the prompt, its ids, the answer key and the
        session stay.
        """
        self.response, self.response_ids, self.logprobs, self.tool_calls = (
            "",
            no_tokens(),
            no_logprobs(),
            [],
        )
        self.response_mask = None
        self.ref_logprobs = None
        self.values = None
        self.routed_experts = None
        self.spans, self.reward = [], None
        self.finish_reason = None
        self.error = None
        self.status = Status.INIT


def with_known_rows(
    known: NDArray[np.int16] | str | None, whole: NDArray[np.int16] | str | None
) -> NDArray[np.int16] | str | None:
    """Routed experts of a whole sequence, but for the rows that were known before: these stay."""
    if isinstance(known, np.ndarray) and isinstance(whole, np.ndarray):
        joined: NDArray[np.int16] = np.concatenate([known, as_column(whole[len(known) :], "<i2")])
        return joined
    return whole


def expert_rows(prompt: int, response: int) -> int:
    """Tokens that were routed to sample a response: all but the last one, which nobody has read
    yet.
    """
    return max(prompt + response - 1, 0)


PRECEDENCE = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED, Status.INIT)


def group_status(statuses: Iterable[Status | str]) -> Status:
    """The status of a group from those of its members: the first of `PRECEDENCE` that one has, else
    COMPLETED.

    On purpose unlike the reference, where a group of INIT members, or of none, counts as COMPLETED
    because nothing else fits: here it is INIT as long as one member still is (it waits or is being
    made, and is never submitted), and a group without members is an error. Neither can ever be
    trained.
    """
    held = {Status(status) for status in set(statuses)}
    if not held:
        raise WireError("a group has no rollouts", hint="every group holds prompt_repeat_k of them")
    return next((status for status in PRECEDENCE if status in held), Status.COMPLETED)
