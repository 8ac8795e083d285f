"""Keep one context of the model, from its first token to the last sampled one, for the trainer.

Invariant: `ids` are exactly what the engine was given and what it sampled, never a text that was
tokenized again; a token is trained in at most one segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.checks import check_plain
from buffer.wire.group import (
    GATEWAY_RECORD,
    NEW_CONTEXTS,
    OPEN_SESSIONS,
    SESSIONS_RESTARTED,
    new_contexts,
)
from buffer.wire.rollout import RolloutState, ToolCall, VersionSpan, with_known_rows
from producer_workers.engines.base import Generation

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One context of the model: its tokens, and the conversation in them as the agent sees it."""

    messages: Messages
    tools: Any
    ids: NDArray[np.int32]  # [n]
    mask: NDArray[np.uint8]  # [n], 1 for sampled and trained
    logprobs: NDArray[np.float32]  # [n]
    spans: tuple[VersionSpan, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    finish_reason: str = ""
    experts: NDArray[np.int16] | str | None = None  # of all ids but the last, if recorded
    after: int = 0  # how many answers its session had when its last turn was asked

    @classmethod
    def begin(cls, messages: Messages, tools: Any, prompt: Sequence[int]) -> Segment:
        ids = np.array(prompt, "<i4")
        return cls(messages, tools, ids, np.zeros(len(ids), "u1"), np.zeros(len(ids), "<f4"))

    def read(self, tokens: NDArray[np.int32], messages: Messages) -> Segment:
        """Return this context with `tokens` behind it, whose conversation is then `messages`."""
        more = len(tokens)
        return replace(
            self,
            messages=messages,
            ids=np.concatenate([self.ids, tokens]).astype("<i4"),
            mask=np.concatenate([self.mask, np.zeros(more, "u1")]),
            logprobs=np.concatenate([self.logprobs, np.zeros(more, "<f4")]),
        )

    def order(self) -> tuple[int, bool]:
        """Order segments by when their last turn was asked; of those at once, by tools.

        Agents ask for a title beside their first question, without tools.
        """
        return self.after, bool(self.tools)

    def add_turn(
        self, made: Generation, messages: Messages, text: str, calls: Sequence[ToolCall]
    ) -> Segment:
        """Return this context with the model's turn, which ends `messages`."""
        start = len(self.ids)
        return replace(
            self,
            messages=messages,
            ids=np.concatenate([self.ids, made.token_ids]).astype("<i4"),
            mask=np.concatenate([self.mask, np.ones(len(made.token_ids), "u1")]),
            logprobs=np.concatenate([self.logprobs, made.logprobs]).astype("<f4"),
            spans=(*self.spans, *(span._replace(start=span.start + start) for span in made.spans)),
            calls=(*self.calls, *calls),
            text=text,
            finish_reason=made.finish_reason,
            experts=with_known_rows(self.experts, made.routed_experts),
        )

    def untrained(self) -> Segment:
        """Return this as context alone: another segment trains these tokens."""
        nothing = np.zeros(len(self.ids), "u1")
        return replace(self, mask=nothing, logprobs=nothing.astype("<f4"), spans=(), calls=())

    # -- as rollouts

    @classmethod
    def of_state(cls, state: RolloutState) -> Segment:
        assert state.prompt_ids is not None
        before = len(state.prompt_ids)
        trained = state.response_mask
        if trained is None:
            trained = np.ones(len(state.response_ids), "u1")
        return cls(
            [],
            None,
            np.concatenate([state.prompt_ids, state.response_ids]).astype("<i4"),
            np.concatenate([np.zeros(before, "u1"), trained]),
            np.concatenate([np.zeros(before, "<f4"), state.logprobs]).astype("<f4"),
            tuple(span._replace(start=span.start + before) for span in state.spans),
            tuple(state.tool_calls),
            state.response,
            state.finish_reason or "",
            state.routed_experts,
        )

    def filled(self, state: RolloutState, **changes: Any) -> RolloutState:
        """Return a copy of `state` with this segment, all of it in the response."""
        made = state.model_copy(update=changes)
        self.fill(made, 0)
        return made

    def fill(self, state: RolloutState, prompt: int) -> None:
        """Write this segment into `state`, with its first `prompt` tokens as the group's prompt."""
        state.prompt_ids = self.ids[:prompt]
        state.response_ids = self.ids[prompt:]
        state.logprobs = self.logprobs[prompt:]
        state.response_mask = self.mask[prompt:]
        state.spans = [span._replace(start=span.start - prompt) for span in self.spans]
        state.response = self.text
        state.tool_calls = list(self.calls)
        state.finish_reason = self.finish_reason
        state.routed_experts = self.experts


def common_prompt(segments: Sequence[Segment]) -> int:
    """Return how many first tokens all segments share without training any of them."""
    shortest = min(
        int(segment.mask.argmax()) if segment.mask.any() else len(segment.ids)
        for segment in segments
    )
    first = segments[0].ids[:shortest]
    for segment in segments[1:]:
        same = segment.ids[:shortest] == first[:shortest]
        shortest = shortest if same.all() else int((~same).argmax())
        first = first[:shortest]
    return shortest


class SessionRecord:
    """The interrupted sessions of a claimed group, kept in its `extra` for the next worker.

        extra["open_sessions"] = {"<index>": [[messages, tools, finish_reason], ...]}
        extra["sessions_restarted"] = 2
        extra["new_contexts"] = {"turn": 3}

    An open session, which its agent can resume, has one entry per rollout, in order; their tokens
    are in the rollouts. Sessions that cannot be resumed, or whose tokens are too old, begin again
    and are counted, and so are contexts that began within a session, by the words of `why_new`, or
    because the chat template rewrites earlier turns ("template"), or because another request had
    continued the same turn ("branch").
    """

    def __init__(self, extra: dict[str, Any]) -> None:
        self._found: dict[str, list[Any]] = dict(extra.get(OPEN_SESSIONS, {}))
        self._open: dict[str, list[Any]] = {}
        self._restarted = int(extra.get(SESSIONS_RESTARTED, 0))
        self._new_contexts = Counter(new_contexts(extra))

    def resume(self, rollouts: Sequence[RolloutState]) -> list[Segment]:
        """Return the segments of an open session; empty if it begins (again)."""
        known = self._found.get(str(rollouts[0].index), [])
        sampled = [rollout for rollout in rollouts if len(rollout.response_ids)]
        if not known or len(sampled) != len(known):
            self._restarted += bool(known)
            return []
        names = ("messages", "tools", "finish_reason")
        return [
            replace(Segment.of_state(rollout), after=n, **dict(zip(names, kept, strict=True)))
            for n, (rollout, kept) in enumerate(zip(sampled, known, strict=True))
        ]

    def keep(self, index: int, segments: Sequence[Segment]) -> None:
        self._open[str(index)] = [[s.messages, s.tools, s.finish_reason] for s in segments]

    def restart(self) -> None:
        self._restarted += 1

    def count(self, contexts: Mapping[str, int]) -> None:
        self._new_contexts.update(contexts)

    def write(self, states: Sequence[RolloutState]) -> None:
        counts = {
            SESSIONS_RESTARTED: self._restarted,
            OPEN_SESSIONS: self._open,
            NEW_CONTEXTS: dict(self._new_contexts),
        }
        record = {name: value for name, value in counts.items() if value}
        for state in states:
            state.extra = without_record(state.extra) | record


def check_storable(messages: Messages, tools: Any) -> None:
    """Raise WireError if the record of an interrupted session could not be stored with these."""
    check_plain("messages and tools", [{OPEN_SESSIONS: {"0": [[list(messages), tools]]}}])
    try:
        msgpack.packb([*messages, tools])
    except OverflowError as error:
        raise WireError(f"messages and tools: {error}") from error


def without_record(extra: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name not in GATEWAY_RECORD}
