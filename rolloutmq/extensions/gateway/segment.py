"""Keep one context of the model, from its first token to the last sampled one, for the trainer.

Invariant: `ids` are exactly what the engine was given and what it sampled, never a text that was
tokenized again; a token is trained in at most one segment.

An earlier turn is a prefix of its segment (`ends`), so a session keeps each token once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.wire.columns import all_columns, large_columns
from buffer.wire.large_columns import LargeColumn
from buffer.wire.rollout import RolloutState, ToolCall, VersionSpan
from producer_workers.engines.base import Generation
from rolloutmq.extensions.gateway.history import Conversation, Messages


class TurnEnd(NamedTuple):
    """The end of a turn in a segment, counted from its beginning, and what its answer told.

    `after`: how many answers its session had when it was asked. `name`: of the answer ("":
    unknown). `instructed`: how many first messages of the segment are instructions of the request
    alone, which a request after this answer does not continue.
    """

    messages: int
    tokens: int
    after: int = 0
    name: str = ""
    instructed: int = 0
    sampled: int = 0  # its tokens
    finish_reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One context of the model: its tokens, and the conversation in them as the agent sees it."""

    messages: Messages
    said: Conversation  # the messages, as far as they are compared with a request
    tools: Any
    ids: NDArray[np.int32]  # [n]
    mask: NDArray[np.uint8]  # [n], 1 for sampled and trained
    logprobs: NDArray[np.float32]  # [n]
    spans: tuple[VersionSpan, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    finish_reason: str = ""
    # large columns, as if all ids were the response
    recorded: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[TurnEnd, ...] = ()  # of the model's turns in it

    @classmethod
    def begin(
        cls,
        messages: Messages,
        said: Conversation,
        tools: Any,
        prompt: Sequence[int] | NDArray[np.int32],
    ) -> Segment:
        ids = np.array(prompt, "<i4")
        zeros = np.zeros(len(ids), "u1")
        return cls(messages, said, tools, ids, zeros, zeros.astype("<f4"))

    def then(self, more: Segment) -> Segment:
        """Return this context with `more` behind it; its tools stay."""
        tokens, messages = len(self.ids), len(self.messages)
        ends = [
            end._replace(messages=messages + end.messages, tokens=tokens + end.tokens)
            for end in more.ends
        ]
        return replace(
            more,
            messages=[*self.messages, *more.messages],
            said=self.said.then(more.said),
            tools=self.tools,
            ids=np.concatenate([self.ids, more.ids]),
            mask=np.concatenate([self.mask, more.mask]),
            logprobs=np.concatenate([self.logprobs, more.logprobs]),
            spans=(*self.spans, *_moved(more.spans, tokens)),
            calls=(*self.calls, *more.calls),
            recorded={
                name: column.then(
                    self.recorded.get(name),
                    tokens,
                    more.recorded.get(name),
                    len(more.ids),
                    is_read=name in more.recorded,
                )
                for name, column in large_columns().items()
            },
            ends=(*self.ends, *ends),
        )

    def order(self) -> tuple[int, bool]:
        """Order segments by when their last turn was asked; of those at once, by tools.

        Agents ask for a title beside their first question, without tools.
        """
        return self.ends[-1].after, bool(self.tools)

    def add_turn(
        self,
        made: Generation,
        message: dict[str, Any],
        text: str,
        calls: Sequence[ToolCall],
        told: tuple[int, str, int] = (0, "", 0),
    ) -> Segment:
        """Return this context with the model's turn, whose `text` no stop string has cut.

        `told`: `after`, `name` and `instructed` of its `TurnEnd`.
        """
        tokens = len(made.token_ids)
        turn = Segment(
            [message],
            Conversation.of([message]),
            None,
            made.token_ids.astype("<i4"),
            np.ones(tokens, "u1"),
            made.logprobs.astype("<f4"),
            tuple(made.spans),
            tuple(calls),
            text,
            made.finish_reason,
            ends=(TurnEnd(1, tokens, *told, tokens, made.finish_reason),),
        )
        recorded = {
            name: column.grown(
                self.recorded.get(name), len(self.ids), made.columns.get(name), tokens
            )
            for name, column in large_columns().items()
        }
        return replace(self.then(turn), recorded=recorded)

    def untrained(self) -> Segment:
        """Return this as context alone: another segment trains these tokens."""
        nothing = np.zeros(len(self.ids), "u1")
        return replace(
            self,
            mask=nothing,
            logprobs=nothing.astype("<f4"),
            spans=(),
            calls=(),
            recorded=self._recorded(lambda column, own: column.before(own, None)),
        )

    def _recorded(self, change: Callable[[LargeColumn, Any], Any]) -> Mapping[str, Any]:
        rows = large_columns()
        return {name: change(rows[name], own) for name, own in self.recorded.items()}

    def until(self, end: TurnEnd) -> Segment:
        """Return this if it ends there; else an earlier context, which this segment trains."""
        if end == self.ends[-1]:
            return self
        cut = replace(
            self,
            messages=self.messages[: end.messages],
            said=self.said.part(0, end.messages),
            ids=self.ids[: end.tokens],
            recorded=self._recorded(lambda column, own: column.before(own, end.tokens)),
            ends=self.ends[: self.ends.index(end) + 1],
        )
        return cut.untrained()

    def behind(self, parent: Segment) -> Segment:
        """Return what is new in this since `parent`, and the last token of that."""
        first = len(parent.ids) - 1
        return replace(
            self,
            messages=self.messages[len(parent.messages) :],
            ids=self.ids[first:],
            recorded=self._recorded(lambda column, own: column.behind(own, first)),
            mask=self.mask[first:],
            logprobs=self.logprobs[first:],
            spans=_moved(self.spans[len(parent.spans) :], -first),
            calls=self.calls[len(parent.calls) :],
        )

    # -- as rollouts

    @classmethod
    def of_state(
        cls,
        state: RolloutState,
        messages: Messages = (),
        tools: Any = None,
        ends: Sequence[TurnEnd] = (),
    ) -> Segment:
        """Return the segment of a rollout; `ends`: of its turns, one by default."""
        assert state.prompt_ids is not None
        before = len(state.prompt_ids)
        ids = np.concatenate([state.prompt_ids, state.response_ids]).astype("<i4")
        return cls(
            messages,
            Conversation.of(messages),
            tools,
            ids,
            np.concatenate([np.zeros(before, "u1"), state.whole_mask()]),
            np.concatenate([np.zeros(before, "<f4"), state.logprobs]).astype("<f4"),
            _moved(state.spans, before),
            tuple(state.tool_calls),
            state.response,
            state.finish_reason or "",
            {
                name: column.shifted(column.get(state), before, 0)
                for name, column in large_columns().items()
            },
            tuple(ends) or (TurnEnd(len(messages), len(ids)),),
        )

    def filled(self, state: RolloutState, **changes: Any) -> RolloutState:
        """Return a copy of `state` with this segment, all of it in the response."""
        made = state.model_copy(update=changes)
        self.fill(made, 0)
        return made

    def fill(self, state: RolloutState, prompt: int) -> None:
        """Write this segment into `state`, with its first `prompt` tokens as the group's prompt."""
        before = 0 if state.prompt_ids is None else len(state.prompt_ids)
        for column in all_columns():
            if isinstance(column, LargeColumn):
                value = column.shifted(self.recorded.get(column.name), 0, prompt)
            else:
                value = column.shifted(column.get(state), before, prompt)
            column.set(state, value)
        state.prompt_ids = self.ids[:prompt]
        state.response_ids = self.ids[prompt:]
        state.logprobs = self.logprobs[prompt:]
        state.response_mask = self.mask[prompt:]
        state.spans = list(_moved(self.spans, -prompt))
        state.response = self.text
        state.tool_calls = list(self.calls)
        state.finish_reason = self.finish_reason


def _moved(spans: Iterable[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    return tuple(span._replace(start=span.start + tokens) for span in spans)


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


def share_prompt(group: Sequence[RolloutState]) -> None:
    """Make what all segments of a group begin with its prompt."""
    segments = [(state, Segment.of_state(state)) for state in group if len(state.response_ids)]
    if not segments:
        return
    prompt = common_prompt([segment for _, segment in segments])
    for state, segment in segments:
        segment.fill(state, prompt)
    for state in group:
        state.prompt_ids = segments[0][1].ids[:prompt]


def _fitting(segments: Sequence[Segment], given: Conversation) -> Iterator[tuple[Segment, TurnEnd]]:
    """Yield where `given` continues segments."""
    for segment in segments:
        shared = min(given.shared(segment.said), len(given.turns) - 1)
        if ends := [end for end in segment.ends if end.messages <= shared]:
            yield segment, ends[-1]


def continued_by(
    segments: Sequence[Segment], given: Conversation, tools: Any, free: Collection[Segment]
) -> Segment | None:
    """Return the context that a request continues; if several fit, the one that is most alike.

    `free` are segments that no request continues yet.
    """

    def likeness(fit: tuple[Segment, TurnEnd]) -> tuple[Any, ...]:
        segment, end = fit
        is_free = end == segment.ends[-1] and segment in free
        return (end.messages, *segment.said.is_like(given, end.messages), is_free)

    offered = [segment for segment in segments if segment.tools == tools]
    found = max(_fitting(offered, given), key=likeness, default=None)
    return found and found[0].until(found[1])


def why_new(segments: Sequence[Segment], given: Conversation) -> str:
    """Return why a request continues no context: a word for its count; "" for the first one.

    conversation: another one began. again: the same was asked again. tools: others were offered.
    system: the system prompt was changed. turn: a turn of the model was changed. history: another
    earlier message was changed or cut.
    """
    if not segments:
        return ""
    if any(_fitting(segments, given)):
        return "tools"
    nearest = max((segment.said for segment in segments), key=given.shared)
    shared = given.shared(nearest)
    if given.part(0, shared).opening is None:
        openings = [segment.said.opening for segment in segments]
        return "system" if given.opening in openings else "conversation"
    if shared == len(given.turns):
        return "again"
    both = isinstance(nearest.turns[shared], tuple) and isinstance(given.turns[shared], tuple)
    return "turn" if both else "history"
