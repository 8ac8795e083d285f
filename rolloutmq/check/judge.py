"""Score two answers to one problem with its judge: the ground truth itself, and a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from buffer.errors import JudgeError
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, Status
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.config.task import RUNS_PROGRAMS, TaskSection, judge_names
from producer_workers.judges.built_in import final_number, number_span
from producer_workers.judges.expressions import Truth
from producer_workers.judges.judge import Judge
from producer_workers.judges.load import load_worker_judge, make_judge
from producer_workers.judges.watched_judges import JudgeTimes, WatchedJudges
from rolloutmq.check.finding import Finding

NOTHING = "nothing"
WRONG = "This answer is wrong on purpose."

READ_ROWS = 10  # rows whose ground truth the report shows as a judge of answers reads it
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
        yield Finding("judge", "error", what, "[tasks.<name>.judging] has the limits of a judge")
    if not errors:
        yield from _compared(name, scores)


def truth_findings(
    name: str, task: TaskSection, prompts: Sequence[RolloutState]
) -> Iterator[Finding]:
    """Yield how judges of answers read the ground truths of some prompts."""
    read = [(_reads(task, state), state) for state in prompts[:READ_ROWS]]
    lines = [text for texts, _ in read for text in texts]
    rows = [state.extra["row"] for texts, state in read if any(NOTHING in text for text in texts)]
    if rows:
        what = f"task {name}: its judge reads no answer in the ground truth of row {rows[0]}"
        fix = f"so in {len(rows)} of {len(read)} rows: check the field that holds the ground truth"
        yield Finding("judge", "error", what, fix)
    if lines:
        title = f"task {name}: what its judge reads in the ground truths of {len(read)} rows"
        yield Finding("judge", "ok", title, text="\n".join(lines))


def _reads(task: TaskSection, state: RolloutState) -> list[str]:
    """Return, for each judge of answers that judges a rollout, what it reads and where."""
    truth, lines = str(state.ground_truth), []
    spec = task.judge if isinstance(task.judge, dict) else {"*": task.judge}
    source = state.data_source or ""
    names = judge_names({"": next((spec[each] for each in spec if fnmatchcase(source, each)), {})})
    if "gsm8k" in names:
        span = number_span(truth)
        lines.append(
            f"{final_number(truth) or NOTHING}  in  {(span.text if span else truth)!r:.60}"
        )
    if "math_verify" in names:
        found = Truth.of(truth)
        kind = found.number or found.words or (found.text and "an expression") or NOTHING
        lines.append(f"{kind}  in  {found.text!r:.60}")
    return lines


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
