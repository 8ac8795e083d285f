"""A group: the rollouts of one prompt, the unit of every queue.

A group that was received keeps its token columns as views of the received bytes: `response_ids`,
`logprobs` and `mask` of all members are concatenated, in parts of `lengths`. A trainer packs from
these without a Python object per token or rollout; `states` makes the objects on first use.
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
    """Return the group without its responses, as it is when it starts again."""
    states = [state.model_copy() for state in group.states]
    for state in states:
        state.reset_response()
    return RolloutGroup(group.gid, group.task, states)


Member = dict[str, Any]
"""What a rollout has besides its token columns; the keys are those of `buffer.model.wire`."""

GROUP_TIME = "group_time_s"
"""Key of `extra`: the seconds that workers have spent on a group, over all its claims."""

OPEN_SESSIONS = "open_sessions"
SESSIONS_RESTARTED = "sessions_restarted"
"""Keys of `extra`: the gateway's record of sessions that were interrupted."""


class RolloutGroup:
    """The k rollouts of one prompt, as columns over all of them.

    Columns: prompt_ids int32[P], lengths int32[k], response_ids int32[sum R], logprobs
    float32[sum R], mask uint8[sum R], scores float32[k]. None where no rollout has them:
    ref_logprobs and values float32[sum R] (nan for a rollout without), routed_experts
    int16[rows, layers, top_k] (P + R - 1 rows for each member with `routed_experts: True`).

    Usage:

        group = RolloutGroup("math-0000000007", "math", states)
        for state in group.states: ...
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
        """Return a received group; `buffer.model.wire` has checked that the columns agree."""
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
        """Return the rollouts as objects, which are made on first use."""
        if self._states is None:
            self._states = list(self._make_states())
        return self._states

    @property
    def scores(self) -> NDArray[np.float32]:
        """Return `reward["score"]` of each member, float32[k]; nan without one."""
        rewards = (m.get("reward") or {} for m in self.members)
        return np.array([r.get("score", np.nan) for r in rewards], "<f4")

    @property
    def multimodal(self) -> list[MediaRef]:
        """Return the images of the prompt, in the order of their tokens.

        Read one with `run.media.read(uri, …)`.
        """
        return [MediaRef(**media) for media in self.shared.get("multimodal") or ()]

    @property
    def sessions(self) -> list[str]:
        """Return the session of each member.

        Segments of one session share it; any other rollout is a session of its own.
        """
        ids = (m.get("session_id") for m in self.members)
        return [
            f"{self.members[n]['index']}/{name}" if name else f"#{n}" for n, name in enumerate(ids)
        ]

    @property
    def status(self) -> Status:
        """Return the status of the group (`group_status`)."""
        return group_status(m["status"] for m in self.members)

    def oldest(self) -> VersionSpan | None:
        """Return the span with the oldest policy version; None where no token was sampled."""
        spans = (VersionSpan(*s) for m in self.members for s in m.get("spans", ()))
        return min((s for s in spans if s.length), key=lambda s: s.version, default=None)

    def oldest_by_lineage(self) -> dict[str, int]:
        """Return the oldest policy version of each lineage of weights in the group."""
        # of all lineages, because only the server knows which are still in use
        oldest: dict[str, int] = {}
        for member in self.members:
            for _, length, version, lineage in member.get("spans", ()):
                if length:
                    oldest[lineage] = min(version, oldest.get(lineage, version))
        return oldest

    def made_by(self, by_token: bool) -> list[str | int]:
        """Return the weights of a group as scripts take them: "oldest", lineage, version, ….

        `by_token`: followed by `last_by_lineage` as "last", lineage, version, ….
        """
        triples = [("oldest", *pair) for pair in self.oldest_by_lineage().items()]
        if by_token:
            triples += [("last", *pair) for pair in self.last_by_lineage().items()]
        return [part for triple in triples for part in triple]

    def last_by_lineage(self) -> dict[str, int]:
        """Return the newest version that keeps every rollout trainable, by lineage of weights.

        Of each rollout whose trained tokens all have a version, the lineage of its last span and
        the newest version in that lineage count; of several rollouts, the oldest. Other rollouts
        never expire by token.
        """
        found: dict[str, int] = {}
        for member, part in self._parts():
            mask = self.mask[part]
            spans = [VersionSpan(*s) for s in member.get("spans", ())]
            trained = [s for s in spans if mask[s.start : s.start + s.length].any()]
            covered = sum(int(mask[s.start : s.start + s.length].sum()) for s in trained)
            if not trained or covered < mask.sum():
                continue
            lineage = max(trained).lineage
            newest = max(s.version for s in trained if s.lineage == lineage)
            found[lineage] = min(newest, found.get(lineage, newest))
        return found

    def fresh_mask(
        self, step: int, token_threshold: int | None, forks: Sequence[tuple[str, int]] = ()
    ) -> NDArray[np.uint8]:
        """Return the mask without tokens that are too old for step T, uint8[sum R] (`token_mask`).

        `forks`: (lineage, first step) of the run, which limit the versions (`living_version`).
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
        """Return `routed_experts` of each member, in the form of `RolloutState`."""
        if self._states is not None:
            return [state.routed_experts for state in self._states]
        found, row = [], 0
        for member, part in self._parts():
            recorded = member.get("routed_experts")
            if recorded is True and self.routed_experts is not None:
                rows = expert_rows(len(self.prompt_ids), part.stop - part.start)
                recorded = self.routed_experts[row : row + rows]
                row += rows
            found.append(recorded)
        return found

    def _parts(self) -> Iterator[tuple[Member, slice]]:
        """Yield each member, with the part of the columns that is its own."""
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
    """Return what all rollouts of a prompt share, without the rare fields that it does not have."""
    shared: dict[str, Any] = {
        "messages": state.messages,
        "data_source": state.data_source,
        "ground_truth": state.ground_truth,
        "extra": state.extra,
    }
    images = [media.model_dump(exclude_defaults=True) for media in state.multimodal]
    optional = {
        "tools": state.tools,
        "tool_choice": state.tool_choice,
        "multimodal": images or None,
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
    """Return the part of a rollout in an optional column; None where it has none."""
    if column is None or part.start == part.stop or np.isnan(column[part.start]):
        return None
    return column[part]


def _experts(gid: str, states: Sequence[RolloutState]) -> NDArray[np.int16] | None:
    inline = [s.routed_experts for s in states if isinstance(s.routed_experts, np.ndarray)]
    if len({experts.shape[1:] for experts in inline}) > 1:
        raise WireError(
            f"group {gid}: routed_experts have different shapes: {[list(e.shape) for e in inline]}"
        )
    return np.concatenate(inline) if inline else None


def _mask(state: RolloutState) -> NDArray[np.uint8]:
    if state.response_mask is None:
        return np.ones(len(state.response_ids), "u1")
    return state.response_mask


def _member(state: RolloutState) -> Member:
    member: Member = {
        "index": state.index,
        "status": state.status.value,
        "sample": state.sample_params.model_dump(exclude_defaults=True),
    }
    experts = state.routed_experts
    calls = [call.model_dump(exclude_defaults=True) for call in state.tool_calls]
    optional = {
        "response": state.response or None,
        "reward": state.reward,
        "finish_reason": state.finish_reason,
        "error": state.error,
        "spans": [list(s) for s in state.spans] or None,
        "session_id": state.session_id,
        "tool_calls": calls or None,
        "routed_experts": True if isinstance(experts, np.ndarray) else experts,
    }
    return member | {name: value for name, value in optional.items() if value is not None}


def _state_fields(member: Member) -> dict[str, Any]:
    fields = dict(member)
    fields["sample_params"] = SampleParams(**fields.pop("sample"))
    fields["spans"] = [VersionSpan(*s) for s in fields.pop("spans", ())]
    return fields
