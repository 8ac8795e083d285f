"""Open each task's data set, and make prompts of its first rows as the producer would."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from buffer.errors import DatasetError, HubError, RolloutMQError
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.tokenizer import Tokenizer, encode_chat, load_tokenizer
from producer_workers.build import problems_dir, task_sampler, task_tokenizer
from producer_workers.config.task import NO_JUDGE, TaskSection
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.open import open_dataset
from producer_workers.judges.load import check_truth
from producer_workers.producer.sampler import JUDGED, Sampler, TooLong
from rolloutmq.check.finding import Finding, Unit, absent, failure, findings_of
from rolloutmq.check.judge import judge_findings
from rolloutmq.check.shape import context_tokens
from rolloutmq.config.config import Config
from rolloutmq.config.small_model import small_model

ROWS = 64  # rows of a data set that are made into prompts and encoded
SHOWN = 3  # unusable rows in the report
OPEN_S = 3600.0  # to open a large data set, or to generate one
SCANNED = 4096  # rows of a data set whose ground truths are shown to the judges
COMPARED = 200_000  # rows of a data set whose texts are compared with those of an evaluation

ok, warning, mistake = findings_of("data")


def units(config: Config, *, quick: bool) -> list[Unit]:
    found = []
    for name, task in config.tasks.items():
        check = _open_for_run if quick else _check_data
        found.append(Unit("data", f"task {name}", partial(check, config, name), OPEN_S))
        if not quick and task.judge != NO_JUDGE and task.eval_of is None:
            judge = partial(_check_judge, config, name)
            found.append(Unit("judge", f"task {name}: its judge", judge, task.judging.timeout_s))
    return found


def _open_for_run(config: Config, name: str) -> Iterator[Finding]:
    """Open a data set; write generated problems into the folder of the run."""
    rows = len(_open(config, name, problems_dir(config, name)))
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
            dataset.row(row)
        yield ok(f"task {name}: {len(dataset):,} rows, with images")
        return
    if unjudged := list(_unjudged(task, dataset)):
        yield from _refused(name, unjudged)
        return
    tokenizer, note = _tokenizer(config)
    sampler = task_sampler(config, name, dataset, tokenizer)
    draws = list(_draws(sampler, min(ROWS, len(dataset))))
    first = [each[0] for each in draws if isinstance(each, list)]
    lengths = [len(_ids(state)) for state in first]
    yield from _refused(name, [each for each in draws if isinstance(each, DatasetError)])
    sizes = f"{min(lengths):,} to {max(lengths):,}" if lengths else "no"
    yield ok(f"task {name}: {len(dataset):,} rows, prompts of {sizes} {note or 'tokens'}")
    if first and task.eval_of is None:
        yield ok(f"task {name}: its first prompt", text=str(tokenizer.decode(_ids(first[0]))))
    if skipped := sum(isinstance(each, TooLong) for each in draws):
        tokens = config.producer.max_prompt_tokens
        limit = f"[producer] max_prompt_tokens = {tokens}" if tokens else "2 MiB of text"
        yield (mistake if skipped == len(draws) else warning)(
            f"task {name}: {skipped} of {len(draws)} prompts exceed {limit} and are skipped",
            "raise it, with [engine] max_model_len, or leave the long rows out",
        )
    if not note:
        yield from _too_long(config, name, lengths)
    if first and _drops_text(task_tokenizer(tokenizer, task), first[0]):
        yield mistake(
            f"task {name}: the chat template drops the text of the user: all prompts are alike",
            "see chat_template of the model's tokenizer, and [tasks.<name>] chat_template_kwargs",
        )
    if task.eval_of is not None:
        config.evaluation_size(name)  # raises ConfigError
        yield from _seen_in_training(config, name, dataset)


def _draws(sampler: Sampler, count: int) -> Iterator[list[RolloutState] | TooLong | DatasetError]:
    """Draw and encode the first rows as a producer does; yield the reason where one is refused."""
    for draw in range(count):
        try:
            states = sampler.draw(draw)
            if not isinstance(states, TooLong):
                sampler.encode(draw, states)
            yield states
        except DatasetError as error:
            yield error


def _check_judge(config: Config, name: str) -> Iterator[Finding]:
    tokenizer, _ = _tokenizer(config)
    try:
        sampler = task_sampler(config, name, _open(config, name), tokenizer)
        drawn = (found[0] for found in _draws(sampler, ROWS) if isinstance(found, list))
        prompt = next(drawn, None)
    except RolloutMQError:
        return  # the unit of the data set reports it
    if prompt:
        yield from judge_findings(name, config.tasks[name], prompt, tokenizer)


def _open(config: Config, name: str, folder: Path | None = None) -> Dataset:
    """Open a data set; without `folder`, problems are generated outside of the run's folder."""
    task = config.tasks[name]
    if folder is None:
        kept = problems_dir(config, name)
        folder = kept if kept.exists() else Path(_scratch().name) / kept.name
    return open_dataset(task.dataset, folder, task.split, seed=config.run.seed)


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rolloutmq-check-")


def _tokenizer(config: Config) -> tuple[Tokenizer, str]:
    """Return the tokenizer of the model, and a note if another one stands in for it."""
    with suppress(HubError):
        if config.model_folder.is_dir():
            return _load(str(config.model_folder)), ""
    note = "" if config.policy.model is None else "characters, without the model"
    return small_model(config).tokenizer(), note


_load = cache(load_tokenizer)


def _ids(state: RolloutState) -> list[int]:
    return [] if state.prompt_ids is None else state.prompt_ids.tolist()


def _refused(name: str, errors: Sequence[DatasetError]) -> Iterator[Finding]:
    yield from (failure("data", error, f"task {name}") for error in errors[:SHOWN])
    if len(errors) > SHOWN:
        what = f"task {name}: {len(errors)} of the rows that were tried cannot be used"
        yield mistake(what, "the first such row stops the task")


def _too_long(config: Config, name: str, lengths: Sequence[int]) -> Iterator[Finding]:
    """Yield what happens to prompts that leave no room for a response."""
    task, context, longest = config.tasks[name], context_tokens(config), max(lengths, default=0)
    asked = task.sample.max_tokens
    if context and longest >= context:
        yield mistake(
            f"task {name}: a prompt of {longest:,} tokens fills the engine's {context:,} tokens",
            "raise [engine] max_model_len, or set [producer] max_prompt_tokens",
        )
    elif context and "max_tokens" in task.sample.model_fields_set and longest + asked > context:
        yield warning(
            f"task {name}: behind a prompt of {longest:,} tokens, the engine's context has room "
            f"for {context - longest:,}, fewer than sample.max_tokens = {asked:,}",
            "lower sample.max_tokens, or raise [engine] max_model_len",
        )
    limit = config.trainer.max_sequence_tokens
    if limit is None or config.trainer.loop or task.eval_of:
        return
    if too_long := sum(length >= limit for length in lengths):
        yield (mistake if too_long == len(lengths) else warning)(
            f"task {name}: {too_long} of {len(lengths)} prompts fill [trainer] max_sequence_tokens "
            f"= {limit:,}, so their rollouts are never trained",
            "raise it, or set [producer] max_prompt_tokens, which skips them",
        )


def _drops_text(tokenizer: Tokenizer, state: RolloutState) -> bool:
    """Return whether another text of the user is the same prompt."""
    messages = state.messages or []
    other = [
        each | {"content": f"1 {each['content']} 1"} if _is_asked(each) else each
        for each in messages
    ]
    return other != messages and encode_chat(tokenizer, other, state.tools) == _ids(state)


def _is_asked(message: dict[str, Any]) -> bool:
    return message["role"] == "user" and isinstance(message["content"], str)


def _seen_in_training(config: Config, name: str, dataset: Dataset) -> Iterator[Finding]:
    """Yield a warning for each training task that has problems of this evaluation."""
    asked = {text: row for row, text in _texts(dataset)}
    for other in config.training_tasks:
        with suppress(HubError):
            trained = _texts(_open(config, other))
            if found := sorted({asked[text] for _, text in trained if text in asked}):
                shown = ", ".join(map(str, found[:SHOWN])) + ", …" * (len(found) > SHOWN)
                yield warning(
                    f"task {name}: {len(found):,} of its {len(asked):,} problems are in the "
                    f"training set of task {other}, too (rows {shown}): its accuracy is that of "
                    "answers that were trained",
                    "remove them from one of the two data sets",
                )


def _texts(dataset: Dataset) -> Iterator[tuple[int, str]]:
    """Yield the text that a user asks in each usable row, without spacing."""
    for row in range(min(COMPARED, len(dataset))):
        with suppress(DatasetError):
            asked = [each["content"] for each in dataset.row(row).messages if _is_asked(each)]
            if text := " ".join(" ".join(asked).split()):
                yield row, text


def _unjudged(task: TaskSection, dataset: Dataset) -> Iterator[DatasetError]:
    """Yield an error for each of SCANNED rows that cannot be read, or that no judge can judge."""
    for row in range(0, len(dataset), max(1, len(dataset) // SCANNED)):
        try:
            problem = dataset.row(row)
            check_truth(task.judge, problem.data_source, problem.ground_truth)
        except DatasetError as error:
            yield error
        except ValueError as error:
            yield DatasetError(f"row {row}: {error}", hint=JUDGED)
