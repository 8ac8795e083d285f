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
from rolloutmq.check.finding import Finding, Unit, absent, failure
from rolloutmq.check.judge import judge_findings
from rolloutmq.check.shape import context_tokens
from rolloutmq.config.config import Config

ROWS = 64  # rows of a data set that are made into prompts and encoded
SHOWN = 3  # unusable rows in the report
OPEN_S = 3600.0  # to open a large data set, or to generate one
SCANNED = 4096  # rows of a data set whose ground truths are shown to the judges

COMPARED = 200_000  # rows of a data set whose texts are compared with those of an evaluation


def units(config: Config, *, quick: bool) -> list[Unit]:
    found = []
    for name, task in config.tasks.items():
        what = f"task {name}"
        check_data = _open_for_run if quick else _check_data
        found.append(Unit("data", what, partial(check_data, config, name), OPEN_S))
        if not quick and task.judge != NO_JUDGE and task.eval_of is None:
            check = partial(_check_judge, config, name)
            found.append(Unit("judge", f"{what}: its judge", check, task.judging.timeout_s))
    return found


def _open_for_run(config: Config, name: str) -> Iterator[Finding]:
    """Open a data set; write generated problems into the folder of the run."""
    rows = len(_open(config, name, problems_dir(config, name)))
    yield Finding("data", "ok", f"task {name}: {rows:,} rows")


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
        yield Finding("data", "ok", f"task {name}: {len(dataset):,} rows, with images")
        return
    if unjudged := list(_unjudged(task, dataset)):
        yield from _refused(name, unjudged)
        return
    tokenizer, note = _tokenizer(config)
    sampler = task_sampler(config, name, dataset, tokenizer)
    draws = list(_draws(sampler, min(ROWS, len(dataset))))
    first = [states[0] for states in draws if isinstance(states, list)]
    yield from _refused(name, [each for each in draws if isinstance(each, DatasetError)])
    yield _summary(name, len(dataset), first, note)
    if first and task.eval_of is None:
        shown = str(tokenizer.decode(_ids(first[0])))
        yield Finding("data", "ok", f"task {name}: its first prompt", text=shown)
    yield from _skipped(config, name, sum(isinstance(each, TooLong) for each in draws), len(draws))
    if not note:
        yield from _cut_off(config, name, first)
        yield from _never_trained(config, name, first)
    yield from _without_text(name, task_tokenizer(tokenizer, task), first)
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


@cache
def _tokenizer_of(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


def _tokenizer(config: Config) -> tuple[Tokenizer, str]:
    """Return the tokenizer of the model, and a note if another one stands in for it."""
    with suppress(HubError):
        if config.model_folder.is_dir():
            return _tokenizer_of(config.model_folder), ""
    from consumer.grpo.models.tiny_model import build_tokenizer

    tokenizer = build_tokenizer(config.tiny_model)
    return tokenizer, "" if config.policy.model is None else "characters, without the model"


# -- what is found --------------------------------------------------------------------------------


def _summary(name: str, rows: int, first: Sequence[RolloutState], note: str) -> Finding:
    lengths = [_tokens(state) for state in first]
    sizes = f"{min(lengths):,} to {max(lengths):,}" if lengths else "no"
    what = f"task {name}: {rows:,} rows, prompts of {sizes} {note or 'tokens'}"
    return Finding("data", "ok", what)


def _ids(state: RolloutState) -> list[int]:
    return [] if state.prompt_ids is None else state.prompt_ids.tolist()


def _tokens(state: RolloutState) -> int:
    return len(_ids(state))


def _refused(name: str, errors: Sequence[DatasetError]) -> Iterator[Finding]:
    yield from (failure("data", error, f"task {name}") for error in errors[:SHOWN])
    if len(errors) > SHOWN:
        what = f"task {name}: {len(errors)} of the rows that were tried cannot be used"
        yield Finding("data", "error", what, "the first such row stops the task")


def _skipped(config: Config, name: str, skipped: int, of: int) -> Iterator[Finding]:
    if skipped:
        tokens = config.producer.max_prompt_tokens
        limit = f"[producer] max_prompt_tokens = {tokens}" if tokens else "2 MiB of text"
        yield Finding(
            "data",
            "error" if skipped == of else "warning",
            f"task {name}: {skipped} of {of} prompts exceed {limit} and are skipped",
            "raise it, with [engine] max_model_len, or leave the long rows out",
        )


def _cut_off(config: Config, name: str, first: Sequence[RolloutState]) -> Iterator[Finding]:
    context = context_tokens(config)
    longest = max(map(_tokens, first), default=0)
    sample = config.tasks[name].sample
    is_asked = "max_tokens" in sample.model_fields_set
    if context and longest >= context:
        yield Finding(
            "data",
            "error",
            f"task {name}: a prompt of {longest:,} tokens fills the engine's context of "
            f"{context:,} tokens",
            "raise [engine] max_model_len, or set [producer] max_prompt_tokens",
        )
    elif context and is_asked and longest + sample.max_tokens > context:
        yield Finding(
            "data",
            "warning",
            f"task {name}: behind a prompt of {longest:,} tokens, a response ends after "
            f"{context - longest:,} tokens at the end of the engine's context, before "
            f"sample.max_tokens = {sample.max_tokens:,}",
            "lower sample.max_tokens, or raise [engine] max_model_len",
        )


def _never_trained(config: Config, name: str, first: Sequence[RolloutState]) -> Iterator[Finding]:
    limit = config.trainer.max_sequence_tokens
    if limit is None or config.trainer.loop or config.tasks[name].eval_of:
        return
    if too_long := sum(_tokens(state) >= limit for state in first):
        yield Finding(
            "data",
            "error" if too_long == len(first) else "warning",
            f"task {name}: {too_long} of {len(first)} prompts fill [trainer] max_sequence_tokens = "
            f"{limit:,}, so their rollouts are never trained",
            "raise it, or set [producer] max_prompt_tokens, which skips them",
        )


def _without_text(
    name: str, tokenizer: Tokenizer, first: Sequence[RolloutState]
) -> Iterator[Finding]:
    """Yield an error if the chat template drops the text of the user."""
    for state in first[:1]:
        messages = state.messages or []
        other = [
            each | {"content": f"1 {each['content']} 1"} if _is_asked(each) else each
            for each in messages
        ]
        if other != messages and encode_chat(tokenizer, other, state.tools) == _ids(state):
            yield Finding(
                "data",
                "error",
                f"task {name}: the chat template drops the text of the user: all prompts are alike",
                "see chat_template of the model's tokenizer, and [tasks.<name>] "
                "chat_template_kwargs",
            )


def _is_asked(message: dict[str, Any]) -> bool:
    return message["role"] == "user" and isinstance(message["content"], str)


def _seen_in_training(config: Config, name: str, dataset: Dataset) -> Iterator[Finding]:
    """Yield a warning for each training task that has problems of this evaluation."""
    asked = {_text_of(dataset, row): row for row in range(min(COMPARED, len(dataset)))}
    for other in config.training_tasks:
        with suppress(HubError):
            trained = _open(config, other)
            rows = range(min(COMPARED, len(trained)))
            found = sorted(
                {asked[t] for t in (_text_of(trained, r) for r in rows) if t and t in asked}
            )
            if found:
                shown = ", ".join(map(str, found[:SHOWN])) + ", …" * (len(found) > SHOWN)
                yield Finding(
                    "data",
                    "warning",
                    f"task {name}: {len(found):,} of its {len(asked):,} problems are in the "
                    f"training set of task {other}, too (rows {shown}): its accuracy is that of "
                    "answers that were trained",
                    "remove them from one of the two data sets",
                )


def _text_of(dataset: Dataset, row: int) -> str | None:
    """Return the text that a user asks in a row, without spacing; None for an unusable row."""
    try:
        messages = dataset.row(row).messages
    except DatasetError:
        return None
    return " ".join(
        word for each in messages if _is_asked(each) for word in each["content"].split()
    )


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
