"""A group: the rollouts of one prompt, the unit of every queue.

A group that came over the wire keeps its token columns as views of the received bytes:
`response_ids`, `logprobs` and `mask` of all members lie one behind the other, `lengths` says where
each ends. A trainer packs from these without one Python object per token or per rollout; `states`
makes the objects when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.model.rollout import (
    MediaRef,
    RolloutState,
    SampleParams,
    Status,
    VersionSpan,
    expert_rows,
    group_status,
)
from buffer.model.staleness import living_version, token_mask


def prompt_of(group: RolloutGroup) -> RolloutGroup:
    """The group before anything was generated: what an expired one goes back to."""
    states = [state.model_copy() for state in group.states]
    for state in states:
        state.reset_response()
    return RolloutGroup(group.gid, group.task, states)


Member = dict[str, Any]

GROUP_TIME = "group_time_s"
"""In `extra`: the seconds that workers spent on a group so far, over all its claims."""
"""What is kept per rollout beside its token columns; the keys are those of `buffer.model.wire`."""


class RolloutGroup:
    """`states` (k rollouts) of the group `gid` of `task`. Columns: prompt_ids int32[P], lengths
    int32[k], response_ids int32[sum R], logprobs float32[sum R], mask uint8[sum R], scores
    float32[k]. None where no rollout has them: ref_logprobs and values float32[sum R] (nan for a
    rollout without), routed_experts int16[rows, layers, top_k] (P + R - 1 rows for each rollout
    whose member says `routed_experts: True`).
    """

    def __init__(self, gid: str, task: str, states: Sequence[RolloutState]) -> None:
        if not states:
            raise WireError(f"group {gid} has no rollouts")
        first = states[0]
        self.gid = gid
        self.task = task
        self.shared = _shared(first)
        self.prompt_ids = first.prompt_ids if first.prompt_ids is not None else np.empty(0, "<i4")
        self.lengths = np.array([len(s.response_ids) for s in states], "<i4")
        self.response_ids = np.concatenate([s.response_ids for s in states])
        self.logprobs = np.concatenate([s.logprobs for s in states])
        self.mask = np.concatenate([_mask(s) for s in states])
        self.ref_logprobs = _optional([s.ref_logprobs for s in states], self.lengths)
        self.values = _optional([s.values for s in states], self.lengths)
        self.routed_experts = _experts(gid, states)
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
        """A group as it came over the wire; `buffer.model.wire` has checked that the columns agree."""
        group = cls.__new__(cls)
        group.gid = gid
        group.task = task
        group.shared = shared
        group.members = members
        group.prompt_ids = columns["prompt_ids"]
        group.lengths = columns["lengths"]
        group.response_ids = columns["response_ids"]
        group.logprobs = columns["logprobs"]
        group.mask = columns["mask"]
        group.ref_logprobs = columns.get("ref_logprobs")
        group.values = columns.get("values")
        group.routed_experts = columns.get("routed_experts")
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
    def multimodal(self) -> list[MediaRef]:
        """The images of the prompt, in the order in which it has their tokens; read with
        `run.media.read(uri, …)`.
        """
        return [MediaRef(**media) for media in self.shared.get("multimodal") or ()]

    @property
    def sessions(self) -> list[str]:
        """What each member belongs to: segments of one session share it, any other rollout is one
        of its own.
        """
        ids = (m.get("session_id") for m in self.members)
        return [
            f"{self.members[n]['index']}/{name}" if name else f"#{n}" for n, name in enumerate(ids)
        ]

    @property
    def status(self) -> Status:
        return group_status(m["status"] for m in self.members)

    def oldest(self) -> VersionSpan | None:
        """The span of the oldest policy version in the group; None where no token was sampled."""
        spans = (VersionSpan(*s) for m in self.members for s in m.get("spans", ()))
        return min((s for s in spans if s.length), key=lambda s: s.version, default=None)

    def oldest_by_lineage(self) -> dict[str, int]:
        """The oldest policy version of each lineage of weights in the group: only the server knows
        which still live.
        """
        oldest: dict[str, int] = {}
        for _, length, version, lineage in (
            span for member in self.members for span in member.get("spans", ())
        ):
            if length:
                oldest[lineage] = min(version, oldest.get(lineage, version))
        return oldest

    def made_by(self, by_token: bool) -> list[str | int]:
        """What scripts are told of the weights behind a group: triples (oldest, lineage, version);
        `by_token`: and of `last_by_lineage` (last, lineage, version).
        """
        told = [("oldest", *pair) for pair in self.oldest_by_lineage().items()]
        told += [("last", *pair) for pair in self.last_by_lineage().items()] if by_token else []
        return [part for triple in told for part in triple]

    def last_by_lineage(self) -> dict[str, int]:
        """By lineage of weights, the version after which the first rollout has no trained token
        that is fresh.

        Of each rollout whose trained tokens all have a version, the lineage of the last one and its
        newest version count; of several rollouts, the oldest. Others never run out.
        """
        found: dict[str, int] = {}
        for member, part in self._parts():
            mask = self.mask[part]
            spans = [VersionSpan(*s) for s in member.get("spans", ())]
            trained = [s for s in spans if mask[s.start : s.start + s.length].any()]
            if (
                not trained
                or sum(int(mask[s.start : s.start + s.length].sum()) for s in trained) < mask.sum()
            ):
                continue
            lineage = max(trained).lineage
            newest = max(s.version for s in trained if s.lineage == lineage)
            found[lineage] = min(newest, found.get(lineage, newest))
        return found

    def fresh_mask(
        self, step: int, token_threshold: int | None, forks: Sequence[tuple[str, int]] = ()
    ) -> NDArray[np.uint8]:
        """uint8[sum R]: the mask without tokens that are too old for step T by themselves
        (`token_mask`).

        `forks`: of the lineages of the run, as versions count (`living_version`).
        """
        masks = []
        for member, part in self._parts():
            spans = [VersionSpan(*s) for s in member.get("spans", ())]
            spans = [s._replace(version=living_version(forks, s.lineage, s.version)) for s in spans]
            fresh = token_mask(
                self.mask[part], part.stop - part.start, spans, step, token_threshold
            )
            masks.append(self.mask[part] if fresh is None else fresh)
        return np.concatenate(masks)

    def experts(self) -> list[NDArray[np.int16] | str | None]:
        """`routed_experts` of each member, as of `RolloutState`."""
        if self._states is not None:
            return [state.routed_experts for state in self._states]
        found, row = [], 0
        for member, part in self._parts():
            recorded = member.get("routed_experts")
            if recorded is True and self.routed_experts is not None:
                rows = expert_rows(len(self.prompt_ids), part.stop - part.start)
                recorded = self.routed_experts[row : row + rows]
                row = row + rows
            found.append(recorded)
        return found

    def _parts(self) -> Iterator[tuple[Member, slice]]:
        """Each member, and where its tokens are."""
        start = 0
        for member, length in zip(self.members, self.lengths.tolist(), strict=True):
            yield member, slice(start, start + length)
            start += length

    def _make_states(self) -> Iterator[RolloutState]:
        for (member, part), experts in zip(self._parts(), self.experts(), strict=True):
            mask = self.mask[part]
            fields = _state_fields(member) | {"routed_experts": experts}
            yield RolloutState(
                **self.shared,
                prompt_ids=self.prompt_ids,
                response_ids=self.response_ids[part],
                logprobs=self.logprobs[part],
                response_mask=None if mask.all() else mask,
                ref_logprobs=_own(self.ref_logprobs, part),
                values=_own(self.values, part),
                **fields,
            )


def _shared(state: RolloutState) -> dict[str, Any]:
    """What a prompt has once for all its rollouts; what few prompts have is left out where it is
    not there.
    """
    shared: dict[str, Any] = {
        "messages": state.messages,
        "data_source": state.data_source,
        "ground_truth": state.ground_truth,
        "extra": state.extra,
    }
    optional = {
        "tools": state.tools,
        "tool_choice": state.tool_choice,
        "multimodal": [media.model_dump(exclude_defaults=True) for media in state.multimodal]
        or None,
    }
    return shared | {name: value for name, value in optional.items() if value is not None}


def _optional(
    columns: list[NDArray[np.float32] | None], lengths: NDArray[np.int32]
) -> NDArray[np.float32] | None:
    if not any(column is not None and len(column) for column in columns):
        return None
    filled = zip(columns, lengths.tolist(), strict=True)
    return np.concatenate(
        [np.full(n, np.nan, "<f4") if column is None else column for column, n in filled]
    )


def _own(column: NDArray[np.float32] | None, part: slice) -> NDArray[np.float32] | None:
    """A rollout's part of an optional column; None where it has none."""
    if column is None or part.start == part.stop or np.isnan(column[part.start]):
        return None
    return column[part]


def _experts(gid: str, states: Sequence[RolloutState]) -> NDArray[np.int16] | None:
    inline = [s.routed_experts for s in states if isinstance(s.routed_experts, np.ndarray)]
    if len({experts.shape[1:] for experts in inline}) > 1:
        raise WireError(
            f"group {gid}: routed_experts of different shapes: {[list(e.shape) for e in inline]}"
        )
    return np.concatenate(inline) if inline else None


def _mask(state: RolloutState) -> NDArray[np.uint8]:
    return (
        np.ones(len(state.response_ids), "u1")
        if state.response_mask is None
        else state.response_mask
    )


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
        "session_id": state.session_id,
        "tool_calls": [call.model_dump(exclude_defaults=True) for call in state.tool_calls] or None,
        "routed_experts": True
        if isinstance(state.routed_experts, np.ndarray)
        else state.routed_experts,
    }
    return member | {name: value for name, value in optional.items() if value is not None}


def _state_fields(member: Member) -> dict[str, Any]:
    fields = dict(member)
    fields["sample_params"] = SampleParams(**fields.pop("sample"))
    fields["spans"] = [VersionSpan(*s) for s in fields.pop("spans", ())]
    return fields
