"""Turn the segments of an agent's sessions into rollouts, with the rewards that the agent gives.

`state` is the agent's own rollout, with its own session's id; `segments` are by a session's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from buffer.errors import WireError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.judges.judge import reward_turns
from rolloutmq.extensions.gateway.agents import EVERY_ROLE, Earned, question_of
from rolloutmq.extensions.gateway.segment import Segment
from rolloutmq.extensions.gateway.session_record import SessionRecord
from rolloutmq.extensions.gateway.task_conversation import of_task, why_other

# The rollouts of an agent or of one of its sessions, one per segment, all tokens in the response;
# without tokens if it was interrupted or failed.
Rollouts = list[RolloutState]


def interrupted_rollouts(
    state: RolloutState, segments: Mapping[str, Sequence[Segment]], record: SessionRecord
) -> Rollouts:
    """Return the rollouts of an agent that goes on later behind these segments."""
    state.status = Status.ABORTED
    state.finish_reason = "abort"
    if not segments:
        return [state]
    record.keep(state.index, segments)
    made = [rollout for name in segments for rollout in _rollouts(state, name, segments[name])]
    for rollout in made:
        rollout.finish_reason = "abort"
    return made


def ended_rollouts(
    state: RolloutState,
    segments: Mapping[str, Sequence[Segment]],
    cut: Collection[str],
    earned: Earned,
    record: SessionRecord,
    *,
    trains_all: bool,
) -> list[Rollouts]:
    """Return the rollouts of each session; the last one has the turn that is judged.

    Sessions in `cut` end at a limit. Conversations but the task's are counted, and are context
    alone unless `trains_all`. Raises WireError.
    """
    question = question_of(state.messages)
    _check_names(segments, earned)
    left_out = {name for name, reward in earned.items() if not reward}
    made = []
    for name in segments:
        if left_out.isdisjoint((name, role_of(name))):
            own = of_task(segments[name], question)
            others = [segment for segment in segments[name] if segment not in own]
            record.count(Counter(why_other(segment, own) for segment in others))
            kept = others if trains_all else [segment.untrained() for segment in others]
            rollouts = _rollouts(state, name, [*kept, *own])
            if name in cut:
                rollouts[-1].finish_reason = "length"
            _earn(rollouts, name, earned)
            made.append(rollouts)
    if not made:
        raise WireError("no reward for any conversation: all are left out")
    return made


def _rollouts(state: RolloutState, name: str, segments: Sequence[Segment]) -> Rollouts:
    session = f"{state.session_id}/{name}" if name else state.session_id
    return [segment.filled(state, session_id=session, role=role_of(name)) for segment in segments]


def _check_names(names: Collection[str], earned: Earned) -> None:
    known = {EVERY_ROLE, *names, *map(role_of, names)}
    if wrong := sorted(name for name, reward in earned.items() if reward and name not in known):
        raise WireError(
            f"rewards of {', '.join(wrong)}, for which the model has said nothing",
            hint='return them by role: {"solver": {"score": 1.0}}; "" is the agent\'s own session',
        )


def _earn(rollouts: Rollouts, name: str, earned: Earned) -> None:
    """Give a session its reward by the agent. Raises WireError."""
    found = (earned.get(each) for each in (name, role_of(name), EVERY_ROLE))
    reward = dict(next(filter(None, found), {}))
    is_named = isinstance(reward.get("role"), str)  # a number is a part of the reward
    role = reward.pop("role") if is_named else role_of(name)
    reward_turns(rollouts, reward)
    for rollout in rollouts:
        rollout.reward = reward or None
        rollout.role = role


def role_of(name: str) -> str:
    """Return the role of a session: those of "solver/1" and "solver/2" are compared."""
    return name.partition("/")[0]
