"""A group: the rollouts of one prompt, the unit of every queue.

A group that came over the wire keeps its token columns as views of the received bytes: `response_ids`,
`logprobs` and `mask` of all members lie one behind the other, `lengths` says where each ends. A trainer packs
from these without one Python object per token or per rollout; `states` makes the objects when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.rollout import RolloutState, SampleParams, Status, VersionSpan, group_status

Member = dict[str, Any]
"""What is kept per rollout beside its token columns; the keys are those of `buffer.wire`."""


class RolloutGroup:
    """`states` (k rollouts) of the group `gid` of `task`. Columns: prompt_ids int32[P], lengths int32[k],
    response_ids int32[sum R], logprobs float32[sum R], mask uint8[sum R], scores float32[k]."""

    def __init__(self, gid: str, task: str, states: Sequence[RolloutState]) -> None:
        if not states:
            raise WireError(f"group {gid} has no rollouts")
        first = states[0]
        self.gid, self.task = gid, task
        self.shared: dict[str, Any] = {
            "messages": first.messages,
            "data_source": first.data_source,
            "ground_truth": first.ground_truth,
            "extra": first.extra,
        }
        self.prompt_ids = first.prompt_ids if first.prompt_ids is not None else np.empty(0, "<i4")
        self.lengths = np.array([len(s.response_ids) for s in states], "<i4")
        self.response_ids = np.concatenate([s.response_ids for s in states])
        self.logprobs = np.concatenate([s.logprobs for s in states])
        self.mask = np.concatenate([_mask(s) for s in states])
        self.members: list[Member] = [_member(s) for s in states]
        self._states: list[RolloutState] | None = list(states)

    @classmethod
    def from_columns(
        cls,
        gid: str,
        task: str,
        shared: dict[str, Any],
        members: list[Member],
        columns: dict[str, NDArray[Any]],
    ) -> RolloutGroup:
        """A group as it came over the wire; `buffer.wire` has checked that the columns agree."""
        group = cls.__new__(cls)
        group.gid, group.task, group.shared, group.members = gid, task, shared, members
        group.prompt_ids, group.lengths = columns["prompt_ids"], columns["lengths"]
        group.response_ids, group.logprobs = columns["response_ids"], columns["logprobs"]
        group.mask = columns["mask"]
        group._states = None
        return group

    def __len__(self) -> int:
        return len(self.members)

    @property
    def states(self) -> list[RolloutState]:
        """The rollouts as objects, made on first use."""
        if self._states is None:
            self._states = list(self._make_states())
        return self._states

    @property
    def scores(self) -> NDArray[np.float32]:
        """float32[k]: `reward["score"]` of each member, nan where there is none."""
        rewards = (m.get("reward") or {} for m in self.members)
        return np.array([r.get("score", np.nan) for r in rewards], "<f4")

    @property
    def status(self) -> Status:
        return group_status(m["status"] for m in self.members)

    def oldest(self) -> VersionSpan | None:
        """The span of the oldest policy version in the group; None where no token was sampled."""
        spans = (VersionSpan(*s) for m in self.members for s in m.get("spans", ()))
        return min((s for s in spans if s.length), key=lambda s: s.version, default=None)

    def oldest_by_lineage(self) -> dict[str, int]:
        """The oldest policy version of each lineage of weights in the group: only the server knows which still live."""
        oldest: dict[str, int] = {}
        for span in (VersionSpan(*s) for m in self.members for s in m.get("spans", ())):
            if span.length:
                oldest[span.lineage] = min(span.version, oldest.get(span.lineage, span.version))
        return oldest

    def _make_states(self) -> Iterator[RolloutState]:
        start = 0
        for member, length in zip(self.members, self.lengths.tolist(), strict=True):
            part = slice(start, start + length)
            mask = self.mask[part]
            yield RolloutState(
                **self.shared,
                prompt_ids=self.prompt_ids,
                response_ids=self.response_ids[part],
                logprobs=self.logprobs[part],
                response_mask=None if mask.all() else mask,
                **_state_fields(member),
            )
            start += length


def _mask(state: RolloutState) -> NDArray[np.uint8]:
    return np.ones(len(state.response_ids), "u1") if state.response_mask is None else state.response_mask


def _member(state: RolloutState) -> Member:
    member: Member = {
        "index": state.index,
        "status": state.status.value,
        "sample": state.sample_params.model_dump(exclude_defaults=True),
    }
    optional = {
        "response": state.response or None,
        "reward": state.reward,
        "finish_reason": state.finish_reason,
        "error": state.error,
        "spans": [list(s) for s in state.spans] or None,
    }
    return member | {name: value for name, value in optional.items() if value is not None}


def _state_fields(member: Member) -> dict[str, Any]:
    fields = dict(member)
    fields["sample_params"] = SampleParams(**fields.pop("sample"))
    fields["spans"] = [VersionSpan(*s) for s in fields.pop("spans", ())]
    return fields
