"""One rollout: a response to a prompt with everything that a trainer needs of it.

Token columns are numpy arrays, never lists, because lists make packing slow. Field names are
those of XTuner where the meaning is the same; `docs/pages/moving.md` lists the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from buffer.errors import WireError
from buffer.wire.column import as_column
from buffer.wire.columns import COLUMNS, known_column
from buffer.wire.sampling import Count, SampleParams
from buffer.wire.sampling_mask import RecordedMask


class Status(StrEnum):
    """The status of a rollout, or of a group (`group_status`)."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


class PolicyVersion(NamedTuple):
    """The name of weights: their lineage, and the train step M after which they were published."""

    lineage: str
    version: int

    def __str__(self) -> str:
        return f"{self.lineage}:{self.version}"

    @classmethod
    def parse(cls, label: str) -> PolicyVersion:
        """Parse the `str` of a version. Raises ValueError."""
        lineage, _, version = label.rpartition(":")
        return cls(lineage, int(version))


FIRST_WEIGHTS = PolicyVersion("initial", 0)
"""The weights that a run starts from, before a trainer opens it."""


class VersionSpan(NamedTuple):
    """The weights (lineage, version) that sampled tokens [start, start + length) (I9)."""

    start: int
    length: int
    version: int
    lineage: str


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


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A function call that the model requested; `arguments` is None for invalid JSON."""

    id: str
    name: str
    arguments: dict[str, Any] | None = None
    raw_arguments: str = ""


class MediaRef(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """An image, video or sound of the prompt, by the path or URL of its file or its features.

    `tokens`: its number of prompt tokens. `grid_thw`: patches in time, height and width, for 3-D
    positions. The buffer never opens or deletes it.
    """

    kind: Literal["image", "video", "audio"]
    uri: Annotated[str, Meta(min_length=1)]
    tokens: Count = 0
    grid_thw: (
        Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=3, max_length=3)] | None
    ) = None


class RolloutState(BaseModel):
    """One of the `prompt_repeat_k` rollouts of a prompt.

    Columns over response tokens have one length R: `response_ids`, `logprobs` (at the sampling
    temperature), `response_mask` (1 = trained; None = all ones), and where they were computed
    `ref_logprobs`, `values` (of states), `token_rewards` (of steps, or of turns at their ends)
    and `teacher_logprobs` (by the teacher's name; its most probable tokens, [R, k], in
    `teacher_top_ids` and `teacher_top_logprobs`). `spans` name the weights that sampled each
    token; a tool's tokens have none. `routed_experts` of a mixture of experts: int16[P + R - 1,
    layers, top_k], the choices for every token but the last, or their address. `sampling_mask`: the
    tokens that each token was sampled from, or their address; None: no token has a restriction.
    `columns` are those of installed packages, by name. `prompt_ids` are the same in the whole
    group.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: int = Field(0, ge=0)
    """position in its group"""
    session_id: str | None = None
    """the turns of one session are sent to the same engine"""
    role: str = ""
    """who speaks, where several agents share a draw; rewards are compared within a role"""
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    """the functions that the model may call, as JSON schemas"""
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
    token_rewards: Float32 | None = None
    teacher_logprobs: dict[str, Float32] | None = None
    teacher_top_ids: dict[str, Int32] | None = None
    teacher_top_logprobs: dict[str, Float32] | None = None
    routed_experts: str | Experts | None = None
    sampling_mask: RecordedMask = None
    columns: dict[str, Any] = {}
    spans: list[VersionSpan] = []
    reward: dict[str, float] | None = None
    finish_reason: str | None = None
    status: Status = Status.INIT
    error: str | None = None
    sample_params: SampleParams = Field(default_factory=SampleParams)
    data_source: str | None = None
    ground_truth: Any = None
    extra: dict[str, Any] = {}

    @model_validator(mode="after")
    def _columns_agree(self) -> RolloutState:
        tokens = len(self.response_ids)
        for name in ("logprobs", "response_mask"):
            column = getattr(self, name)
            if column is not None and len(column) != tokens:
                raise ValueError(f"{len(column)} {name} for {tokens} response tokens")
        if any(s.start < 0 or s.length < 0 or s.start + s.length > tokens for s in self.spans):
            raise ValueError(f"a version span is outside of the {tokens} response tokens")
        given = [(column, getattr(self, name)) for name, column in COLUMNS.items()]
        if self.columns:
            try:
                attached = {known_column(name): own for name, own in self.columns.items()}
            except WireError as error:
                raise ValueError(str(error)) from error
            self.columns = {column.name: column.read(own) for column, own in attached.items()}
            given += [(column, self.columns[column.name]) for column in attached]
        for row, value in given:
            if value is not None and (problem := row.problem(value, self)):
                raise ValueError(problem)
        return self

    def oldest_version(self) -> int | None:
        """Return the oldest policy version M of the tokens; None where no token was sampled."""
        return min((s.version for s in self.spans if s.length), default=None)

    def append(
        self,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        spans: Iterable[VersionSpan],
        **recorded: Any,
    ) -> None:
        """Append newly sampled tokens to the response (partial rollout).

        `recorded`: columns by name, as the engine made them: of these tokens, or rows of the whole
        sequence. Columns that do not cover the new tokens are reset; of `token_rewards` they have
        0. Raises WireError for a name without a column, ValueError for a wrong value.
        """
        done, new = len(self.response_ids), len(token_ids)
        for name in {**COLUMNS, **self.columns, **recorded}:
            column = known_column(name)
            known, made = column.get(self), recorded.get(name)
            if known is not None or made is not None:
                made = None if made is None else column.read(made)
                column.set(self, column.grown(known, done, made, new))
        self.response_ids = np.concatenate([self.response_ids, as_column(token_ids, "<i4")])
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype("<f4", copy=False)
        if self.response_mask is not None:
            self.response_mask = np.concatenate([self.response_mask, np.ones(new, "u1")])
        self.spans = [*self.spans, *(s._replace(start=s.start + done) for s in spans if s.length)]

    def read(self, token_ids: NDArray[np.int32]) -> None:
        """Append tokens that the model did not sample: mask 0, logprob 0, no span."""
        mask = self.whole_mask()
        self.append(token_ids, np.zeros(len(token_ids), "<f4"), ())
        self.response_mask = np.concatenate([mask, np.zeros(len(token_ids), "u1")])

    def whole_mask(self) -> NDArray[np.uint8]:
        """Return which response tokens are trained, uint8[R]; without a mask, all are."""
        mask = self.response_mask
        return np.ones(len(self.response_ids), "u1") if mask is None else mask

    def turns(self) -> list[slice]:
        """Return the model's turns in the response: its runs of trained tokens."""
        edges = np.flatnonzero(np.diff(self.whole_mask(), prepend=0, append=0)).tolist()
        return [slice(edges[n], edges[n + 1]) for n in range(0, len(edges), 2)]

    def reward_turn(self, turn: slice, reward: float) -> None:
        """Set the reward of a turn, in `token_rewards` at its last token."""
        column = self.token_rewards
        column = np.zeros(len(self.response_ids), "<f4") if column is None else column.copy()
        column[turn.stop - 1] = reward
        self.token_rewards = column

    def stamp(self, weights: PolicyVersion) -> int:
        """Record `weights` for the tokens after the last span, and return their number.

        For engines that do not stamp tokens. Earlier tokens keep their spans (I9).
        """
        start = max((span.start + span.length for span in self.spans), default=0)
        new = len(self.response_ids) - start
        if new > 0:
            self.spans = [*self.spans, VersionSpan(start, new, weights.version, weights.lineage)]
        return max(new, 0)

    def slim(self) -> RolloutState:
        """Return a copy for judges and readers, without columns of megabytes. It shares values."""
        large = {name: None for name, column in COLUMNS.items() if column.is_large}
        own = {name: v for name, v in self.columns.items() if not known_column(name).is_large}
        return self.model_copy(update={**large, "columns": own})

    def reset_response(self) -> None:
        """Discard the response; the prompt, its ids, the ground truth and the session stay.

        Of `extra`, the entry `OF_RESPONSE` is discarded.
        """
        for name in _OF_RESPONSE:
            field = RolloutState.model_fields[name]
            setattr(self, name, field.get_default(call_default_factory=True))
        self.extra = {name: value for name, value in self.extra.items() if name != OF_RESPONSE}


OF_RESPONSE = "of_response"
"""Key of `extra`: values that belong to the response, and not to the prompt."""


_OF_RESPONSE = (
    *("response", "response_ids", "logprobs", "tool_calls", "response_mask", "role"),
    *(*COLUMNS, "columns", "spans", "reward", "finish_reason", "error", "status"),
)

ENDED = ("stop", "length")
"""Finish reasons after which a rollout needs no engine, unless it starts again."""


def has_ended(state: RolloutState) -> bool:
    """Return whether the response is complete; its reward may be missing."""
    return state.finish_reason in ENDED


PRECEDENCE = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED, Status.INIT)


def group_status(statuses: Iterable[Status | str]) -> Status:
    """Return the status of a group: the first of `PRECEDENCE` that a member has, else COMPLETED.

    Unlike in the reference, a group with an INIT member is INIT, and one without members an error:
    neither can be trained.
    """
    held = {Status(status) for status in set(statuses)}
    if not held:
        raise WireError("a group has no rollouts", hint="a group has prompt_repeat_k of them")
    return next((status for status in PRECEDENCE if status in held), Status.COMPLETED)
