"""Score two answers to one problem with its judge: the ground truth itself, and a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from buffer.errors import JudgeError
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, Status
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.config.task import RUNS_PROGRAMS, TaskSection
from producer_workers.datasets.records import raised_at
from producer_workers.judges.judge import Judge
from producer_workers.judges.load import load_worker_judge, make_judge
from producer_workers.judges.watched_judges import JudgeTimes, WatchedJudges
from rolloutmq.check.finding import Finding

WRONG = "This answer is wrong on purpose."


Scores = dict[str, dict[str, float] | BaseException]  # by kind of answer: its reward, or the error


def judge_findings(
    name: str, task: TaskSection, prompt: RolloutState, tokenizer: Tokenizer
) -> Iterator[Finding]:
    """Yield what the judge of a task returns for answers to `prompt`."""
    answers = {"a wrong answer": WRONG}
    truth = _right_answer(task, prompt.ground_truth)
    if truth is not None:
        answers = {"its ground truth": truth, **answers}
    rollouts = {kind: _answered(prompt, text, tokenizer) for kind, text in answers.items()}
    scores = asyncio.run(_score(task, rollouts))
    errors = {kind: each for kind, each in scores.items() if isinstance(each, BaseException)}
    for kind, error in list(errors.items())[:1]:
        what = f"task {name}, asked to score {kind}: {getattr(error, 'message', error)}"
        limits = "[tasks.<name>.judging] has the limits of a judge"
        fix = raised_at(error) or getattr(error, "hint", "") or limits
        yield Finding("judge", "error", what, fix)
    if not errors:
        yield from _compared(name, scores)


def _right_answer(task: TaskSection, truth: Any) -> str | None:
    """Return a right answer as text; None if the ground truth is not an answer."""
    if RUNS_PROGRAMS in task.judges or not isinstance(truth, str | int | float):
        return None
    return str(truth)


def _answered(prompt: RolloutState, text: str, tokenizer: Any) -> RolloutState:
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), "<i4")
    state = prompt.model_copy(deep=True)
    state.append(ids, np.zeros(len(ids), "<f4"), ())
    state.stamp(FIRST_WEIGHTS)
    state.response = text
    state.finish_reason = "stop"
    state.status = Status.COMPLETED
    return state


async def _score(task: TaskSection, rollouts: Mapping[str, RolloutState]) -> Scores:
    judging = task.judging
    if judging.kind == "rq":
        judging = judging.model_copy(update={"kind": "process"})
    judges = WatchedJudges(JudgeTimes())
    judge = make_judge(
        task.judge, lambda each: judges.watch(load_worker_judge(each, judging), judging.grace_s)
    )
    try:
        asked = [_ask(judge, state) for state in rollouts.values()]
        return dict(zip(rollouts, await asyncio.gather(*asked), strict=True))
    finally:
        judges.close()
        await asyncio.sleep(0)  # the connections of its processes are closed in the next round


async def _ask(judge: Judge, state: RolloutState) -> dict[str, float] | BaseException:
    try:
        return await judge.judge(state)
    except JudgeError as error:
        return error


def _compared(name: str, scores: Scores) -> Iterator[Finding]:
    given = {kind: reward["score"] for kind, reward in scores.items() if isinstance(reward, dict)}
    what = f"task {name}: " + ", ".join(f"{score:g} for {kind}" for kind, score in given.items())
    right = given.get("its ground truth")
    if right is not None and right <= given["a wrong answer"]:
        yield Finding(
            "judge",
            "warning",
            what,
            "unless an answer needs a form that the ground truth has not (such as \\boxed{…}), "
            "no answer can be right: check the judge, and the field that holds the ground truth",
        )
    else:
        yield Finding("judge", "ok", what)
