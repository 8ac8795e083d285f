"""How a worker treats the groups of one task: its agent loop, members that start again, its filter.

Members that have ended keep their tokens and reward, members without a reward are judged again, the
others are generated again. A group is as old as its oldest member that has tokens (I8).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from buffer.errors import RolloutMQError, Skip
from buffer.failure_text import message_of
from buffer.imports import load_function
from buffer.wire.rollout import RolloutState, Status, has_ended
from buffer.wire.staleness import AgeLimit
from producer_workers.agent_loops.agent_loop import AgentLoop, Generate
from producer_workers.config.strategy import FILTERS
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.judges.watched_judges import WatchedColumns, WatchedJudges
from producer_workers.user_code.user_function import UserExit
from producer_workers.worker.loop_border import LoopInput

log = logging.getLogger("rolloutmq.worker")

SampleFilter = Callable[[Sequence[RolloutState]], bool]
"""Whether a whole, judged group is worth training on (the reference's `is_valid_sample_fn`).

The producer replaces a group that is filtered out; its raw rewards count, its payload is freed.
"""


Discard = Callable[[Sequence[RolloutState]], None]
"""Is given members whose responses are lost next."""


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """How a worker treats the groups of one task.

    `is_valid_sample`: None accepts every completed group. `on_failed_member`: see `generate_each`.
    `train_roles`: None trains all. `column_judges`: they add columns to groups that are kept.
    `is_untruncated`: see `SharedEngine`. `judges`: what watches the judges, perhaps of more tasks.
    """

    agent_loop: AgentLoop
    partial_rollout: bool = False
    is_valid_sample: Callable[[Sequence[RolloutState]], Awaitable[bool]] | None = None
    group_time_limit_s: float | None = None
    on_failed_member: Literal["drop", "train"] = "drop"
    train_roles: Collection[str] | None = None
    column_judges: Sequence[WatchedColumns] = ()
    is_untruncated: bool = False
    judges: WatchedJudges = field(default_factory=WatchedJudges)

    async def finish(self, states: Sequence[RolloutState]) -> bool:
        """Mask, filter and complete the rollouts of a group; return whether to train it.

        Masked are those of roles that are not trained. `is_valid_sample` must accept the rollouts
        of one of the others. Raises JudgeError, JudgeInterrupted, RoleMissing.
        """
        roles = {state.role for state in states}
        trained = roles if self.train_roles is None else roles.intersection(self.train_roles)
        if not trained:
            raise RoleMissing(
                f"no rollout has a role of train_roles = {sorted(self.train_roles or ())}",
                hint=f"the agent gave the roles {sorted(roles)}",
            )
        for state in states:
            if state.role not in trained:
                state.response_mask = np.zeros(len(state.response_ids), "u1")
        if accepts := self.is_valid_sample:
            for role in sorted(trained):
                if await accepts([state for state in states if state.role == role]):
                    break
            else:
                return False
        for judge in self.column_judges:
            await judge.add_to(states)
        return True

    async def generate(
        self,
        states: list[RolloutState],
        engine: Engine,
        gid: str,
        source: LoopInput,
        generate: Generate,
    ) -> list[RolloutState]:
        """Run the agent loop on one group, see `AgentLoop.for_claim`.

        `states` holds the loop's copies until it ends.
        """
        given = list(states)
        states[:] = source.lend(given)
        try:
            made = await generate(list(states), engine, gid)
            return source.accept(given, made)
        except GeneratorExit as error:  # of the loop: no running coroutine is closed
            raise UserExit.of(error) from error
        except BaseExceptionGroup as errors:  # of a loop that has a TaskGroup
            found: BaseException = (
                errors.subgroup(EngineDeadError) or errors.subgroup(Skip) or errors
            )
            while isinstance(found, BaseExceptionGroup):
                found = found.exceptions[0]
            raise found from errors

    async def generate_each(
        self,
        states: list[RolloutState],
        engine: Engine,
        gid: str,
        source: LoopInput,
        generate: Generate,
        tries: int,
        discard: Discard,
    ) -> list[RolloutState]:
        """Run the agent loop, and again for members that failed, up to `tries` times in all.

        Stops at once if all members failed. After the last try, drops the failed members if the
        task trains such groups and at least 2 are left. `discard` is given failed members before
        their responses are lost. Raises what `generate` raises.
        """
        while True:
            made = await self.generate(states, engine, gid, source, generate)
            failed = {state.index: state.error for state in made if state.status is Status.FAILED}
            others = [state for state in made if state.index not in failed]
            if not failed or not others:
                return made
            for index, error in failed.items():
                said = message_of(error or "")
                log.warning("rollout %d failed: %s", index, said, extra={"gid": gid})
            tries -= 1
            lost = [state for state in made if state.index in failed]
            if any(map(is_interrupted, others)):
                discard(lost)
                made = restart(made, failed)
                for state in made:
                    if state.index in failed:
                        interrupt(state)
                return made
            if tries > 0:
                discard(lost)
                states[:] = restart(made, failed)
            elif self.on_failed_member == "train" and len({s.index for s in others}) > 1:
                discard(lost)
                states[:] = others
                if all(state.status is Status.COMPLETED for state in others):
                    return others
            else:
                return made


class RoleMissing(RolloutMQError):
    """No rollout of a group is of a role that is trained."""


def restart_too_old(
    states: Sequence[RolloutState], limit: AgeLimit, discard: Discard
) -> list[RolloutState]:
    """Return the members; those that are too old start again, sessions as a whole."""
    indexes = {s.index for s in states if s.status is Status.EXPIRED or limit.is_too_old(s)}
    discard([state for state in states if state.index in indexes])
    return restart(states, indexes)


def restart(states: Sequence[RolloutState], indexes: Collection[int]) -> list[RolloutState]:
    """Return the members, with one fresh rollout in place of the response of each of `indexes`."""
    firsts = {state.index: state for state in reversed(states)}
    for index in indexes:
        firsts[index].reset_response()
    return [state for state in states if state.index not in indexes or firsts[state.index] is state]


def restart_unfinished(states: Iterable[RolloutState]) -> None:
    """Discard the response of each interrupted member of a task without partial rollout."""
    for state in filter(is_interrupted, states):
        state.reset_response()
        interrupt(state)


def is_interrupted(state: RolloutState) -> bool:
    """Return whether a pause ended a rollout before its response was complete."""
    return state.status is Status.ABORTED and not has_ended(state)


def interrupt(state: RolloutState) -> None:
    state.status = Status.ABORTED
    state.finish_reason = "abort"


def not_all_equal(states: Sequence[RolloutState]) -> bool:
    """Return whether the scores differ: equal ones give no gradient (Yu et al. 2025, DAPO, 3.2)."""
    return len({state.reward["score"] for state in states if state.reward}) > 1


def load_sample_filter(spec: str) -> SampleFilter:
    return load_function(spec, kind="sample filter", built_in=FILTERS)
