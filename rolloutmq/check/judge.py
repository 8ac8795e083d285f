"""Run a task's judge in a check, on a right and a wrong answer; and again, on a group's responses.

`rejudge` calls it without limits of time and memory, in this thread: its exceptions are its own,
and a debugger can stop in it. Nothing of the run changes.
"""

from __future__ import annotations

import asyncio
import pdb
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer.errors import ConfigError, JudgeError
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, Status, ToolCall
from consumer.handle.sample_log import Sample, TokenTexts
from producer_workers.config.task import NO_JUDGE, RUNS_PROGRAMS, TaskSection
from producer_workers.datasets.records import raised_at
from producer_workers.judges.load import load_bare_judge, load_worker_judge, make_judge
from producer_workers.judges.response_text import text_of
from producer_workers.judges.watched_judges import JudgeTimes, WatchedJudges
from producer_workers.user_code.failure import failure_text, is_of_user
from rolloutmq.check.finding import Finding, findings_of
from rolloutmq.views.found_group import FoundGroup

WRONG = "This answer is wrong on purpose."

ok, warning, mistake = findings_of("judge")


def judge_findings(
    name: str, task: TaskSection, prompt: RolloutState, tokenizer: Any
) -> Iterator[Finding]:
    """Yield what the judge of a task returns for its ground truth, and for a wrong answer."""
    answers = {"a wrong answer": WRONG}
    if RUNS_PROGRAMS not in task.judges:
        with suppress(ValueError):  # the ground truth is not an answer
            answers = {"its ground truth": text_of(prompt.ground_truth)} | answers
    scores = {}
    rewards = asyncio.run(_score(task, prompt, answers, tokenizer))
    for kind, reward in zip(answers, rewards, strict=True):
        if isinstance(reward, BaseException):
            limits = "[tasks.<name>.judging] has the limits of a judge"
            fix = raised_at(reward) or getattr(reward, "hint", "") or limits
            said = getattr(reward, "message", reward)
            yield mistake(f"task {name}, asked to score {kind}: {said}", fix)
            return
        scores[kind] = reward["score"]
    what = f"task {name}: " + ", ".join(f"{score:g} for {kind}" for kind, score in scores.items())
    if scores.get("its ground truth", np.inf) > scores["a wrong answer"]:
        yield ok(what)
    else:
        yield warning(
            what,
            "unless an answer needs a form that the ground truth has not (such as \\boxed{…}), "
            "no answer can be right: check the judge, and the field that holds the ground truth",
        )


async def _score(
    task: TaskSection, prompt: RolloutState, answers: Mapping[str, str], tokenizer: Any
) -> list[dict[str, float] | BaseException]:
    """Return the rewards of answers, or the errors of the judge."""
    judging = task.judging
    if judging.kind == "rq":
        judging = judging.model_copy(update={"kind": "process"})
    judges = WatchedJudges(JudgeTimes())
    judge = make_judge(
        task.judge, lambda each: judges.watch(load_worker_judge(each, judging), judging.grace_s)
    )

    async def ask(text: str) -> dict[str, float] | BaseException:
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), "<i4")
        state = prompt.model_copy(deep=True)
        state.append(ids, np.zeros(len(ids), "<f4"), ())
        state.stamp(FIRST_WEIGHTS)
        state.response, state.finish_reason, state.status = text, "stop", Status.COMPLETED
        try:
            return await judge.judge(state)
        except JudgeError as error:
            return error

    try:
        return await asyncio.gather(*map(ask, answers.values()))
    finally:
        judges.close()
        await asyncio.sleep(0)  # the connections of its processes are closed in the next round


@dataclass(frozen=True, slots=True)
class Verdict:
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
    if found.sample:
        states = [_of_sample(found.sample, member) for member in found.sample["members"]]
    for state in states:
        if len(state.response_ids) and not state.response:
            ids = state.response_ids.tolist()
            state.response = texts.joined(ids, skip_special_tokens=True) or ""
    if having := [state for state in states if state.response or len(state.response_ids)]:
        return having
    hint = "a worker keeps those of few groups of one cause: `rolloutmq dead` lists others"
    raise ConfigError(f"the responses of {found.gid} are not kept", hint=hint)


def _of_sample(sample: Sample, member: dict[str, Any]) -> RolloutState:
    """Return a rollout of the sample log, which has no tokens."""
    shared = ("ground_truth", "data_source", "extra", "messages")
    own = ("index", "response", "reward", "finish_reason", "messages")
    fields = {name: sample[name] for name in shared if sample.get(name) is not None}
    fields |= {name: member[name] for name in own if member.get(name) is not None}
    calls = [ToolCall(**call) for call in member.get("tool_calls", [])]
    return RolloutState(**fields, tool_calls=calls)


def judge_again(
    name: str, task: TaskSection, states: Sequence[RolloutState], member: int | None
) -> Iterator[Verdict]:
    """Yield the verdict on each rollout, or on one `member`.

    Raises ConfigError for a task without a judge, or an unknown member.
    """
    wanted = [state for state in states if member in (None, state.index)]
    if not wanted:
        known = ", ".join(str(state.index) for state in states)
        raise ConfigError(f"there is no response of member {member}", hint=f"known: {known}")
    if task.judge == NO_JUDGE:
        raise ConfigError(f"task {name} has no judge: its agent loop gives the rewards")
    judge = make_judge(task.judge, lambda spec: load_bare_judge(spec, task.judging))
    calls = [list(states)] if judge.sees_group else [[state] for state in wanted]
    with asyncio.Runner() as runner:  # one loop, to which clients of an async judge belong
        for asked in calls:
            given = [state.model_copy(deep=True) for state in asked]
            try:
                rewards = runner.run(judge.judge_group(given))
                verdicts = [Verdict(*each) for each in zip(asked, rewards, strict=True)]
            except (Exception, SystemExit) as error:  # a judge may raise anything but Ctrl-C
                verdicts = [Verdict(state, error=error) for state in asked]
            yield from (each for each in verdicts if member in (None, each.state.index))


def debug(error: BaseException) -> None:
    """Open pdb at the line of the user's code that raised an error, or called what raised it."""
    nodes = [error.__traceback__] if error.__traceback__ else []
    while nodes and nodes[-1].tb_next:
        nodes.append(nodes[-1].tb_next)
    users = [each for each in nodes if is_of_user(each.tb_frame.f_code.co_filename)] or nodes
    users[-1].tb_next = None  # pdb opens the innermost frame
    pdb.post_mortem(users[0])
