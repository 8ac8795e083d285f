"""One rollout as data curators see it: a line of a JSONL file, or a row of a Parquet file.

The lines of a group stand together. Each has their number (`samples`), so that a group that was cut
is noticed. `stage`, `status` of waiting groups and `staleness` are not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buffer.errors import WireError
from buffer.wire import group_bytes
from buffer.wire.columns import COLUMNS, all_columns
from buffer.wire.document import plain_structure, read_structure
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.sampling import SampleParams

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RolloutLine(BaseModel):
    """A line that is imported: no unknown fields; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid")

    gid: Annotated[str, Field(min_length=1, max_length=200)]
    task: str | None = None
    index: int | None = Field(None, ge=0)
    samples: int | None = Field(None, ge=1)
    session_id: str | None = None
    role: str = ""
    stage: str | None = None
    status: Status = Status.COMPLETED
    staleness: int | None = None
    messages: list[dict[str, Any]] = []
    prompt_ids: list[TokenId] = []
    response: str = ""
    response_ids: list[TokenId]
    logprobs: list[Finite]
    response_mask: list[Literal[0, 1]] | None = None
    spans: list[VersionSpan] = []
    columns: dict[str, Any] = {}
    """optional columns; in a file, those of the project are fields of the line"""
    reward: dict[str, Finite]
    finish_reason: str | None = "stop"
    error: str | None = None
    sample_params: dict[str, Any] = {}
    data_source: str | None = None
    ground_truth: Any = None
    extra: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _take_columns(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        flat = {name: fields[name] for name in COLUMN_FIELDS if fields.get(name) is not None}
        rest = {name: value for name, value in fields.items() if name not in COLUMN_FIELDS}
        return rest | {"columns": {**(rest.get("columns") or {}), **flat}}

    @classmethod
    def parse(cls, fields: Any) -> RolloutLine:
        """Return the line of these fields. Raises ValueError with one sentence on what is wrong."""
        if not isinstance(fields, dict):
            raise ValueError(f"a {type(fields).__name__}, not an object")
        try:
            line = cls.model_validate(fields)
            line.state(0)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{field}: {first['msg']}" if field else first["msg"]) from error
        except msgspec.ValidationError as error:
            raise ValueError(f"sample_params: {error}") from error
        if line.status is not Status.COMPLETED:
            raise ValueError(f"status: {line.status}; only completed rollouts can be imported")
        if "score" not in line.reward:
            raise ValueError("reward: no score")
        if not line.response_ids:
            raise ValueError("response_ids: empty, so there is nothing to train on")
        return line

    def state(self, index: int) -> RolloutState:
        """Return the rollout of this index. Raises ValidationError if columns do not agree."""
        own = {"gid", "task", "index", "samples", "stage", "staleness", "sample_params"}
        fields = self.model_dump(exclude={*own, "columns"})
        columns = dict(self.columns)
        for column in all_columns():
            value = column.of_fields(*[columns.pop(name, None) for name in column.to_fields(None)])
            if value is not None:
                (fields if column.name in COLUMNS else columns)[column.name] = value
        spans = [VersionSpan(*span) for span in fields.pop("spans")]
        params = msgspec.convert(self.sample_params, SampleParams, dec_hook=read_structure)
        return RolloutState(
            **fields, columns=columns, index=index, sample_params=params, spans=spans
        )


COLUMN_FIELDS = {field: row for row in COLUMNS.values() for field in row.to_fields(None)}
"""The fields of a line that have the project's own optional columns, and whose they are."""

FIELDS = (*RolloutLine.model_fields, *COLUMN_FIELDS)


def group_of(lines: Sequence[RolloutLine], gid: str, task: str) -> RolloutGroup:
    """Return the whole, encodable group of these lines under a new gid. Raises ValueError."""
    first = lines[0]
    if any(line.samples not in (None, len(lines)) for line in lines):
        raise ValueError(
            f"group {first.gid} has {len(lines)} of {first.samples} lines: they must be consecutive"
        )
    if len({line.task for line in lines}) > 1:
        raise ValueError(f"group {first.gid}: its lines name different tasks")
    if any(line.prompt_ids != first.prompt_ids for line in lines):
        raise ValueError(f"group {first.gid}: its lines have different prompt_ids")
    indexes = {line.index for line in lines}
    is_counted = indexes in ({None}, set(range(len(indexes))))
    is_shared = len(indexes) < len(lines) and None not in indexes
    if not is_counted or (is_shared and any(line.session_id is None for line in lines)):
        raise ValueError(
            f"group {first.gid}: the index of its lines does not count from 0, each once or for "
            "several sessions or segments"
        )
    ordered = sorted(lines, key=lambda line: line.index or 0)
    states = [
        line.state(number if line.index is None else line.index)
        for number, line in enumerate(ordered)
    ]
    group = RolloutGroup(gid, task, states)
    try:
        group_bytes.encode_checked(group)
    except WireError as error:
        raise ValueError(f"group {first.gid}: {error.message}") from error
    return group


_ANY_VALUES = ("messages", "ground_truth", "extra")


def lines_of(group: RolloutGroup, stage: str, staleness: int | None) -> Iterator[dict[str, Any]]:
    own_fields = [
        name
        for name in RolloutLine.model_fields
        if name in RolloutState.model_fields and name != "columns"
    ]
    for state in group.states:
        line: dict[str, Any] = {
            "gid": group.gid,
            "task": group.task,
            "samples": len(group),
            "stage": stage,
            "staleness": staleness,
        }
        line.update((name, getattr(state, name)) for name in own_fields)
        line["columns"] = {}
        for column in all_columns():
            written = column.to_fields(column.get(state))
            (line if column.name in COLUMNS else line["columns"]).update(written)
        # bytes become base64 text, which is what an import finds
        line.update((name, msgspec.to_builtins(line[name])) for name in _ANY_VALUES)
        line["prompt_ids"] = group.prompt_ids
        line["status"] = state.status.value
        line["spans"] = [list(span) for span in state.spans]
        line["sample_params"] = msgspec.to_builtins(
            state.sample_params.given(), enc_hook=plain_structure
        )
        line["logprobs"] = np.asarray(state.logprobs, np.float32)
        yield {name: line[name] for name in FIELDS}
