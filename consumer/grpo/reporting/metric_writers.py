"""Where the trainer reports: sample log, TensorBoard, Weights & Biases, a progress bar."""

from __future__ import annotations

import errno
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import orjson
from isal import igzip
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from buffer.imports import import_extra
from buffer.redis.whole_file import replace_file
from consumer.config.trainer import TrainingConfig
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.grpo.reporting.sample_log import Sample, SampleFile, sample_files

STEPS_PER_FILE = 100
FILES = 16  # a file has at most this part of `max_bytes`, so little is deleted at once

_FAST = 1  # higher levels save 5 % and cost twice the time

WriterName = Literal["tensorboard", "wandb"]


class MetricWriter:
    """A destination of reports, some of which come again after a restart."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def write_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one held-out task, `eval/*`, for the weights after a step."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples of one step (`consumer.grpo.reporting.sample_log`)."""

    def close(self) -> None: ...


def open_writers(config: TrainingConfig, first: int) -> list[MetricWriter]:
    """Open [trainer] writers and the sample log at step `first`.

    Raises ConfigError where a package is not installed.
    """
    makers: dict[str, Callable[[TrainingConfig, int], MetricWriter]] = {
        "tensorboard": TensorBoardWriter,
        "wandb": WandbWriter,
    }
    writers = [makers[name](config, first) for name in config.trainer.writers]
    if config.samples.groups_per_step:
        writers.append(SampleWriter(config.run.folder, config.samples.max_size, first))
    return writers


class TensorBoardWriter(MetricWriter):
    """Writes event files into `<folder>/tensorboard`: scalars, and config and samples as text."""

    def __init__(self, config: TrainingConfig, first: int) -> None:
        package = import_extra("tensorboardX", '[trainer] writers = ["tensorboard"]')
        self._every = config.samples.report_every_steps
        self._events: Any = package.SummaryWriter(
            str(config.run.folder / "tensorboard"),
            # hide what a killed trainer wrote of later steps: those weights are lost
            purge_step=first,
            # file names have a resolution of one second: without a suffix, a restart within the
            # same second would overwrite a file
            filename_suffix=f".{time.time_ns()}",
        )
        settings = orjson.dumps(config.public(), option=orjson.OPT_INDENT_2).decode()
        self._events.add_text("config", code_block(settings), first)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def write_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        self.write(step, of_task(task, metrics))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if is_due(step, self._every):
            for sample in samples:
                self._events.add_text(f"samples/{sample['why']}", sample_text(sample), step)
            self._events.flush()

    def close(self) -> None:
        self._events.close()


class WandbWriter(MetricWriter):
    """Writes to one run of Weights & Biases, continued after a restart; the x axis is the step.

    Steps there cannot be replaced: those that an earlier trainer wrote are not written again.
    `wandb_run.json` in the run's folder has the id and the last written step.
    """

    def __init__(self, config: TrainingConfig, first: int) -> None:
        package = import_extra("wandb", '[trainer] writers = ["wandb"]')
        folder = config.run.folder
        self._every = config.samples.report_every_steps
        self._table: Callable[..., Any] = package.Table
        self._file = folder / "wandb_run.json"
        self._record: dict[str, Any] = {"id": secrets.token_hex(4), "step": 0}
        if self._file.exists():
            self._record |= orjson.loads(self._file.read_bytes())
        self._run: Any = package.init(
            project=config.wandb.project,
            name=config.wandb.name or config.run.name,
            entity=config.wandb.entity,
            mode=config.wandb.mode,
            id=self._record["id"],
            dir=str(folder),
            resume="allow",
            config=config.public(),
            allow_val_change=True,
        )
        self._run.define_metric("*", step_metric=TRAIN_STEP)
        self._save()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._record["step"]:
            self._run.log({**metrics, TRAIN_STEP: step})
            self._record["step"] = step
            self._save()

    def write_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        self._run.log({**of_task(task, metrics), TRAIN_STEP: step})

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples as a table with a row for each rollout, at the interval."""
        if is_due(step, self._every):
            rows = [row for sample in samples for row in sample_rows(sample)]
            table = self._table(columns=list(COLUMNS), data=rows)
            self._run.log({"samples": table, TRAIN_STEP: step})

    def close(self) -> None:
        self._run.finish()

    def _save(self) -> None:
        replace_file(self._file, orjson.dumps(self._record))


TRAIN_STEP = "train_step"


def is_due(step: int, every: int) -> bool:
    return step == 1 or step % every == 0


def of_task(task: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics `eval/*` of a task as `eval/<task>/*`."""
    return {f"eval/{task}/{name.removeprefix('eval/')}": v for name, v in metrics.items()}


class ProgressBar(MetricWriter):
    def __init__(self, done: int, steps: int, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, reward="-")
        self._bar.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        reward = metrics.get("rewards/mean")
        text = "-" if reward is None else f"{reward:.3f}"
        self._bar.update(self._task, completed=step, reward=text)

    def close(self) -> None:
        self._bar.stop()


def choose(columns: BatchColumns, count: int, seed: int, step: int) -> dict[str, str]:
    """Return which groups of a batch are logged, and why: best, worst, truncated or random, by gid.

    Of groups with equal mean scores, the first is best and the last is worst. The group with the
    most truncated responses is chosen. A step that is trained again logs the same groups.
    """
    gids = columns.gids
    scores = dict(zip(gids, columns.means, strict=True))
    truncated = dict(zip(gids, columns.truncated, strict=True))
    best = sorted(gids, key=lambda gid: -scores[gid])
    longest = sorted(filter(truncated.get, gids), key=lambda gid: -truncated[gid])
    ranked = (("best", best), ("worst", best[::-1]), ("truncated", longest))
    chosen: dict[str, str] = {}
    for why, order in ranked[:count]:
        if gid := next((gid for gid in order if gid not in chosen), ""):
            chosen[gid] = why
    others = [gid for gid in gids if gid not in chosen]
    drawn = random.Random(f"{seed} {step}").sample(others, min(count - len(chosen), len(others)))
    return chosen | dict.fromkeys(drawn, "random")


class SampleWriter(MetricWriter):
    """Appends samples to files of the log that this writer creates.

    Replaces the log from step `first` on. Above `max_bytes`, the oldest files are deleted.
    """

    def __init__(self, run_dir: Path, max_bytes: int, first: int) -> None:
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._file: FileIO | None = None
        self._next = first
        self._steps = 0

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append one step, whole or not at all. Raises OSError."""
        lines = b"".join(orjson.dumps(sample) + b"\n" for sample in samples)
        file = self._file or self._create()
        self._file = None
        start = file.tell()
        try:
            _write(file, igzip.compress(lines, compresslevel=_FAST))
        except OSError:
            # half a member would hide those after it; if this fails, a new file follows
            file.truncate(start)
            file.seek(start)
            self._file = file
            raise
        self._next = step + 1
        self._steps += 1
        if self._steps < STEPS_PER_FILE and file.tell() < self._max_bytes // FILES:
            self._file = file
        else:
            file.close()

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _create(self) -> FileIO:
        files = sample_files(self._run_dir)
        self._delete_oldest(files)
        new = SampleFile.named(self._run_dir, files[-1].number + 1 if files else 1, self._next)
        new.path.parent.mkdir(exist_ok=True)
        self._steps = 0
        return new.path.open("xb", buffering=0)

    def _delete_oldest(self, files: Sequence[SampleFile]) -> None:
        sizes = [file.path.stat().st_size for file in files]
        # room for the next file
        excess = sum(sizes) + self._max_bytes // FILES - self._max_bytes
        for file, size in zip(files, sizes, strict=True):
            if excess <= 0:
                return
            file.path.unlink()
            excess -= size


def _write(file: FileIO, data: bytes) -> None:
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))


# -- samples as text ---------------------------------------------------------------

COLUMNS = (
    *("step", "why", "gid", "task", "rollout", "score", "rewards", "prompt", "response"),
    *("ground_truth", "tokens", "finish_reason", "versions", "staleness"),
)  # one row per rollout


def sample_rows(sample: Sample) -> Iterator[list[Any]]:
    truth = sample.get("ground_truth")
    for member in sample["members"]:
        reward = member["reward"] or {}
        yield [
            *(sample["step"], sample["why"], sample["gid"], sample["task"]),
            *(member["index"], reward.get("score"), _json(reward)),
            *(prompt_text(sample), response_text(member)),
            *(None if truth is None else _text(truth), member["tokens"], member["finish_reason"]),
            *(_versions(member), sample["staleness"]),
        ]


def sample_text(sample: Sample) -> str:
    """Return a group as Markdown in which all that a model wrote is a code block."""
    parts = [f"**{sample['gid']}** ({sample['why']})", code_block(prompt_text(sample))]
    for member in sample["members"]:
        reward = _json(member["reward"] or {})
        facts = (f"#{member['index']} {reward}", f"{member['tokens']} tokens", _versions(member))
        parts += [code_block(", ".join(facts)), code_block(response_text(member))]
    return "\n\n".join(parts)


def prompt_text(sample: Sample) -> str:
    messages = [f"{m.get('role')}: {_text(m.get('content'))}" for m in sample.get("messages", [])]
    return "\n\n".join(messages) or sample.get("prompt") or ""


def response_text(member: dict[str, Any]) -> str:
    turns = member.get("turns")
    return "".join(turn["text"] for turn in turns) if turns else member["response"]


def code_block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _versions(member: dict[str, Any]) -> str:
    versions = sorted({span["version"] for span in member["spans"] if span["length"]})
    return "weights " + ", ".join(str(version) for version in versions) if versions else "-"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)
