"""Keep what was drawn for a group out of the hands of its agent loop.

    drawn ──lend──▶ copies ──▶ agent loop ──▶ what it made ──restore──▶ rollouts of the worker

A loop works on copies, and what it returns is copied again. It may change what belongs to a
response, `extra`, and, if it makes prompts, `prompt_ids`; all else comes back as it was drawn. A
rollout without a response is lent as it was drawn, however often its group was tried before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.rollouts.group import GROUP_TIME, OPEN_SESSIONS, SESSIONS_RESTARTED
from buffer.rollouts.own_copy import own_copy, own_rollout
from buffer.rollouts.rollout import RolloutState, Status

FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "multimodal",
    "sample_params",
    "data_source",
    "ground_truth",
)
"""The fields of a rollout that no agent loop changes, beside `prompt_ids`."""

_RECORDS = (GROUP_TIME, OPEN_SESSIONS, SESSIONS_RESTARTED)


class Drawn:
    """What was drawn for a group, and its prompt as it was claimed.

    A loop that makes prompts may have given a group another prompt at an earlier claim; only
    rollouts that begin are lent the drawn one then.
    """

    def __init__(self, claimed: Sequence[RolloutState], drawn: Sequence[RolloutState]) -> None:
        """Keep the rollouts as they were claimed, and as they were drawn; nobody may change them.

        A rollout that is not in `drawn` counts as drawn as it was claimed.
        """
        self._drawn = {state.index: state for state in [*reversed(claimed), *drawn]}
        self.prompt_ids = _immutable(claimed[0].prompt_ids)

    def lend(
        self, states: Sequence[RolloutState], *, makes_prompts: bool = False
    ) -> list[RolloutState]:
        """Return copies of the rollouts of this group for its agent loop."""
        lent = []
        for state in states:
            prompt_ids = self.prompt_ids
            if makes_prompts:
                source = self._drawn[state.index] if _begins(state) else state
                prompt_ids = _immutable(source.prompt_ids)
            fields = {name: own_copy(value) for name, value in self._fields(state).items()}
            lent.append(own_rollout(state, **fields, prompt_ids=prompt_ids))
        return lent

    def restore(
        self,
        given: Sequence[RolloutState],
        made: Sequence[RolloutState],
        *,
        makes_prompts: bool = False,
    ) -> list[RolloutState]:
        """Return copies of what the loop made, without its changes of what was drawn.

        `given`: the rollouts of which it got copies. COMPLETED ones are returned as they were given
        (a loop that makes prompts may count other tokens of them to the prompt).
        """
        kept: dict[int, list[RolloutState]] = {}
        for state in () if makes_prompts else given:
            if state.status is Status.COMPLETED:
                kept.setdefault(state.index, []).append(state)
        restored = []
        for state in made:
            if state.index not in kept:
                restored.append(own_rollout(state, **self._fields(state)))
            else:
                restored += kept[state.index]
                kept[state.index] = []
        return restored

    def _fields(self, state: RolloutState) -> dict[str, Any]:
        """Return the fields that a rollout has as they were drawn."""
        drawn = self._drawn[state.index]
        fields: dict[str, Any] = {name: getattr(drawn, name) for name in FIELDS}
        if _begins(state):
            records = {name: state.extra[name] for name in _RECORDS if name in state.extra}
            fields["extra"] = drawn.extra | own_copy(records)
        return fields


def _begins(state: RolloutState) -> bool:
    """Return whether a rollout is generated from its prompt."""
    return not len(state.response_ids) and state.status is not Status.COMPLETED


def _immutable(column: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    """Return a copy that cannot be made writable."""
    return None if column is None else np.ndarray(column.shape, column.dtype, column.tobytes())
