"""Open each task's data set, show its first prompt, and let its judge score two answers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from buffer.errors import DatasetError, HubError, JudgeError, RolloutMQError, Skip
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, Status
from producer_workers.agent_loops.tokenizer import load_tokenizer
from producer_workers.build import problems_dir, task_sampler
from producer_workers.config.task import NO_JUDGE, RUNS_PROGRAMS, TaskSection
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.open import open_dataset
from producer_workers.datasets.records import raised_at
from producer_workers.judges.load import check_truth, load_for, load_worker_judge, make_judge
from producer_workers.judges.response_text import text_of
from producer_workers.judges.watched_judges import JudgeTimes, WatchedJudges
from producer_workers.producer.sampler import JUDGED, Sampler, TooLong
from rolloutmq.check.finding import Finding, Unit, absent, failure, findings_of
from rolloutmq.check.memory import context_tokens
from rolloutmq.config.config import Config
from rolloutmq.config.small_model import small_model

ROWS = 64  # rows of a data set that are made into prompts and encoded
SHOWN = 3  # unusable rows in the report
TRUTH, WRONG = "its ground truth", "a wrong answer"

ok, warning, mistake = findings_of("data")


def units(config: Config, *, quick: bool) -> list[Unit]:
    found = []
    for name, task in config.tasks.items():
        check = _open_for_run if quick else _check_data
        # an hour, to open a large data set, or to generate one
        found.append(Unit("data", f"task {name}", partial(check, config, name), 3600.0))
        if not quick and task.judge != NO_JUDGE and task.eval_of is None:
            judge = partial(_check_judge, config, name)
            found.append(Unit("judge", f"task {name}: its judge", judge, task.judging.timeout_s))
    return found


def _open_for_run(config: Config, name: str) -> Iterator[Finding]:
    """Open a data set; write generated problems into the folder of the run."""
    task, folder = config.tasks[name], problems_dir(config, name)
    rows = len(open_dataset(task.dataset, folder, task.split, seed=config.run.seed))
    yield ok(f"task {name}: {rows:,} rows")


def _check_data(config: Config, name: str) -> Iterator[Finding]:
    task = config.tasks[name]
    try:
        dataset = _open(config, name)
    except HubError:
        yield absent("data", getattr(task.dataset, "repository", None))
        return
    if task.images:
        for row in range(min(ROWS, len(dataset))):
            with suppress(Skip):
                dataset.row(row)
        yield ok(f"task {name}: {len(dataset):,} rows, with images")
        return
    if unjudged := list(_unjudged(task, dataset)):
        yield from _refused(name, unjudged)
        return
    tokenizer, note = _tokenizer(config)
    draws = list(_draws(task_sampler(config, name, dataset, tokenizer), len(dataset)))
    yield from _refused(name, [each for each in draws if isinstance(each, DatasetError)])
    first = [each[0] for each in draws if isinstance(each, list)]
    lengths = [len(_ids(state)) for state in first]
    sizes = f"{min(lengths):,} to {max(lengths):,}" if lengths else "no"
    yield ok(f"task {name}: {len(dataset):,} rows, prompts of {sizes} {note or 'tokens'}")
    if first and task.eval_of is None:
        yield ok(f"task {name}: its first prompt", text=str(tokenizer.decode(_ids(first[0]))))
    skipped = sum(isinstance(each, TooLong) for each in draws)
    left_out = [each for each in draws if isinstance(each, Skip)]
    if left_out:
        what = f"{len(left_out)} of the first {len(draws)} rows are skipped: {left_out[0].message}"
        yield warning(f"task {name}: {what}")
    yield from _too_long(config, task, f"task {name}", [] if note else lengths, skipped)
    if task.eval_of is not None:
        config.evaluation_size(name)  # raises ConfigError


def _too_long(
    config: Config, task: TaskSection, name: str, lengths: Sequence[int], skipped: int
) -> Iterator[Finding]:
    """Yield which prompts, of `lengths` in tokens, are skipped or cannot be answered or trained."""
    if skipped:
        tokens = config.producer.max_prompt_tokens
        limit = f"[producer] max_prompt_tokens = {tokens}" if tokens else "2 MiB of text"
        yield (warning if lengths else mistake)(
            f"{name}: {skipped} of {len(lengths) + skipped} prompts exceed {limit} and are skipped",
            "raise it, with [engine] max_model_len, or leave the long rows out",
        )
    context, most = context_tokens(config), config.trainer.max_sequence_tokens
    if context and max(lengths, default=0) >= context:
        yield mistake(
            f"{name}: a prompt of {max(lengths):,} tokens fills the engine's {context:,} tokens",
            "raise [engine] max_model_len, or set [producer] max_prompt_tokens",
        )
    if most is None or config.trainer.loop or task.eval_of:
        return
    if long := sum(length >= most for length in lengths):
        yield (mistake if long == len(lengths) else warning)(
            f"{name}: {long} of {len(lengths)} prompts fill [trainer] max_sequence_tokens "
            f"= {most:,}, so their rollouts are never trained",
            "raise it, or set [producer] max_prompt_tokens, which skips them",
        )


def _open(config: Config, name: str) -> Dataset:
    """Open a data set; problems are generated outside of the run's folder."""
    task, kept = config.tasks[name], problems_dir(config, name)
    folder = kept if kept.exists() else Path(_scratch().name) / kept.name
    return open_dataset(task.dataset, folder, task.split, seed=config.run.seed)


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rolloutmq-check-")


def _unjudged(task: TaskSection, dataset: Dataset) -> Iterator[DatasetError]:
    """Yield an error for each of 4,096 rows that cannot be read, or that no judge can judge."""
    for row in range(0, len(dataset), max(1, len(dataset) // 4096)):
        try:
            problem = dataset.row(row)
            check_truth(task.judge, problem.data_source, problem.ground_truth)
        except Skip:
            continue
        except DatasetError as error:
            yield error
        except ValueError as error:
            yield DatasetError(f"row {row}: {error}", hint=JUDGED)


def _refused(name: str, errors: Sequence[DatasetError]) -> Iterator[Finding]:
    yield from (failure("data", error, f"task {name}") for error in errors[:SHOWN])
    if len(errors) > SHOWN:
        what = f"task {name}: {len(errors)} of the rows that were tried cannot be used"
        yield mistake(what, "the first such row stops the task")


def _tokenizer(config: Config) -> tuple[Any, str]:
    """Return the tokenizer of the model, and a note if another one stands in for it."""
    with suppress(HubError):
        if config.model_folder.is_dir():
            return _load(str(config.model_folder)), ""
    note = "" if config.policy.model is None else "characters, without the model"
    return small_model(config).tokenizer(), note


_load = cache(load_tokenizer)


def _draws(
    sampler: Sampler, rows: int
) -> Iterator[list[RolloutState] | TooLong | DatasetError | Skip]:
    """Draw and encode the first rows as a producer does; yield the reason where one is refused."""
    for draw in range(min(ROWS, rows)):
        try:
            states = sampler.draw(draw)
            if not isinstance(states, TooLong):
                sampler.encode(draw, states)
            yield states
        except (DatasetError, Skip) as error:
            yield error


def _ids(state: RolloutState) -> list[int]:
    return [] if state.prompt_ids is None else state.prompt_ids.tolist()


def _check_judge(config: Config, name: str) -> Iterator[Finding]:
    """Yield what the judge of a task returns for its ground truth, and for a wrong answer."""
    task, (tokenizer, _) = config.tasks[name], _tokenizer(config)
    try:
        dataset = _open(config, name)
        draws = _draws(task_sampler(config, name, dataset, tokenizer), len(dataset))
        prompt = next((found[0] for found in draws if isinstance(found, list)), None)
    except RolloutMQError:
        return  # the unit of the data set reports it
    if prompt is None:
        return
    answers = {WRONG: "This answer is wrong on purpose."}
    if RUNS_PROGRAMS not in task.judges:
        with suppress(ValueError):  # the ground truth is not an answer
            answers = {TRUTH: text_of(prompt.ground_truth)} | answers
    states = []
    for text in answers.values():
        state = prompt.model_copy(deep=True)
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), "<i4")
        state.append(ids, np.zeros(len(ids), "<f4"), ())
        state.stamp(FIRST_WEIGHTS)
        state.response, state.finish_reason, state.status = text, "stop", Status.COMPLETED
        states.append(state)
    scores = {}
    for kind, reward in zip(answers, asyncio.run(_ask(task, states)), strict=True):
        if isinstance(reward, JudgeError | Skip):
            limits = "[tasks.<name>.judging] has the limits of a judge"
            fix = raised_at(reward) or reward.hint or limits
            what = f"task {name}, asked to score {kind}: {reward.message}"
            yield Finding("judge", "error", what, fix)
            return
        scores[kind] = reward["score"]
    what = f"task {name}: " + ", ".join(f"{score:g} for {kind}" for kind, score in scores.items())
    if scores.get(TRUTH, np.inf) > scores[WRONG]:
        yield Finding("judge", "ok", what)
    else:
        fix = "unless an answer needs a form that the ground truth has not (such as \\boxed{…}), "
        fix += "no answer can be right: check the judge, and the field with the ground truth"
        yield Finding("judge", "warning", what, fix)


async def _ask(
    task: TaskSection, states: Sequence[RolloutState]
) -> list[dict[str, float] | JudgeError | Skip]:
    if task.judging.is_elsewhere:
        judging = task.judging.model_copy(update={"kind": "process"})
        task = task.model_copy(update={"judging": judging})
    judges = WatchedJudges(JudgeTimes())
    judge = make_judge(
        task.judge,
        lambda each: judges.watch(load_for(task, each, load_worker_judge), task.judging.grace_s),
    )

    async def ask(state: RolloutState) -> dict[str, float] | JudgeError | Skip:
        try:
            return await judge.judge(state)
        except (JudgeError, Skip) as error:
            return error

    try:
        return await asyncio.gather(*map(ask, states))
    finally:
        judges.close()
        await asyncio.sleep(0)  # the connections of its processes are closed in the next round
