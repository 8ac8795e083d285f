"""Run a task's judge again on the responses of a group, for `rolloutmq rejudge`.

It is called without limits of time and memory, in this thread: its exceptions are its own, and a
debugger can stop in it. Nothing of the run changes.
"""

from __future__ import annotations

import asyncio
import pdb
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.errors import ConfigError
from buffer.wire.rollout import RolloutState, ToolCall
from consumer.handle.sample_log import TokenTexts
from producer_workers.config.task import NO_JUDGE, TaskSection
from producer_workers.judges.load import load_bare_judge, load_for, make_judge
from producer_workers.user_code.failure import failure_text, is_of_user
from rolloutmq.views.found_group import FoundGroup


@dataclass(frozen=True, slots=True)
class Rejudged:
    state: RolloutState
    reward: dict[str, float] | None = None
    error: BaseException | None = None

    def document(self) -> dict[str, Any]:
        return {
            "index": self.state.index,
            "before": self.state.reward,
            "reward": self.reward,
            "error": failure_text(self.error) if self.error else None,
        }


def responses_of(found: FoundGroup, texts: TokenTexts) -> list[RolloutState]:
    """Return the rollouts of a group that have a response. Raises ConfigError without any."""
    states = found.group.states if found.group else []
    if sample := found.sample:  # which has no tokens
        shared = ("ground_truth", "data_source", "extra", "messages")
        own = ("index", "response", "reward", "finish_reason", "messages")
        states = [
            RolloutState(
                **{name: sample[name] for name in shared if sample.get(name) is not None}
                | {name: member[name] for name in own if member.get(name) is not None},
                tool_calls=[ToolCall(**call) for call in member.get("tool_calls", [])],
            )
            for member in sample["members"]
        ]
    for state in states:
        if len(state.response_ids) and not state.response:
            ids = state.response_ids.tolist()
            state.response = texts.joined(ids, skip_special_tokens=True) or ""
    if having := [state for state in states if state.response or len(state.response_ids)]:
        return having
    hint = "a worker keeps those of few groups of one cause: `rolloutmq dead` lists others"
    raise ConfigError(f"the responses of {found.gid} are not kept", hint=hint)


def judge_again(
    name: str, task: TaskSection, states: Sequence[RolloutState], member: int | None
) -> Iterator[Rejudged]:
    """Yield the verdict on each rollout, or on one `member`.

    Raises ConfigError for a task without a judge, or an unknown member.
    """
    wanted = [state for state in states if member in (None, state.index)]
    if not wanted:
        known = ", ".join(str(state.index) for state in states)
        raise ConfigError(f"there is no response of member {member}", hint=f"known: {known}")
    if task.judge == NO_JUDGE:
        raise ConfigError(f"task {name} has no judge: its agent loop gives the rewards")
    judge = make_judge(task.judge, lambda spec: load_for(task, spec, load_bare_judge))
    calls = [list(states)] if judge.sees_group else [[state] for state in wanted]
    with asyncio.Runner() as runner:  # one loop, to which clients of an async judge belong
        for asked in calls:
            given = [state.model_copy(deep=True) for state in asked]
            try:
                rewards = runner.run(judge.judge_group(given))
                verdicts = [Rejudged(*each) for each in zip(asked, rewards, strict=True)]
            except (Exception, SystemExit) as error:  # a judge may raise anything but Ctrl-C
                verdicts = [Rejudged(state, error=error) for state in asked]
            yield from (each for each in verdicts if member in (None, each.state.index))


def debug(error: BaseException) -> None:
    """Open pdb at the line of the user's code that raised an error, or called what raised it."""
    nodes = [error.__traceback__] if error.__traceback__ else []
    while nodes and nodes[-1].tb_next:
        nodes.append(nodes[-1].tb_next)
    users = [each for each in nodes if is_of_user(each.tb_frame.f_code.co_filename)] or nodes
    users[-1].tb_next = None  # pdb opens the innermost frame
    pdb.post_mortem(users[0])
