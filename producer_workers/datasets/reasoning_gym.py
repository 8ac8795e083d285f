"""Write problems of one reasoning-gym task into three JSONL files that share no question.

The package repeats problems, so they are made once, distinct by text, and one seeded shuffle deals
them into held-out, training and warm start. A copy of the section finds them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from buffer.errors import ConfigError
from buffer.readable import did_you_mean
from buffer.redis.whole_file import replace_file
from producer_workers.config.dataset import ReasoningGymSection
from producer_workers.datasets.dataset import permute
from producer_workers.judges.built_in import SOURCE_PREFIX, check_safe, score_entry, task_datasets

_MISSES = 1000  # entries in a row without a new problem, after which there are no more


class ProblemFiles(NamedTuple):
    """The paths of the problems; a file without problems is not written."""

    warm_start: Path
    train: Path
    held_out: Path

    @classmethod
    def within(cls, folder: Path) -> ProblemFiles:
        return cls(*(folder / f"{name}.jsonl" for name in cls._fields))


def write_problems(section: ReasoningGymSection, out_dir: Path) -> ProblemFiles:
    """Make the files of `section`, unless they exist. Raises ConfigError.

    It may be killed at any moment: files appear complete, and the copy of the section last.
    """
    train = section.size - section.warm_start_size - section.held_out_size
    sizes = (section.warm_start_size, train, section.held_out_size)
    files = ProblemFiles.within(out_dir)
    # a change of `format` makes the files anew
    made_of = {"format": 1, **section.model_dump(mode="json")}
    mark = out_dir / "problems.json"
    is_whole = all(file.exists() for file, size in zip(files, sizes, strict=True) if size)
    with suppress(OSError, ValueError):
        if is_whole and orjson.loads(mark.read_bytes()) == made_of:
            return files
    found = _collect(section)
    order = (permute(n, len(found), f"{section.seed}:deal") for n in range(len(found)))
    problems = [found[n] for n in order]
    out_dir.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    for path, size in reversed(list(zip(files, sizes, strict=True))):
        _replace(path, [problems.pop() for _ in range(size)])
    _replace(mark, [orjson.dumps(made_of)])
    return files


def _replace(path: Path, lines: Sequence[bytes]) -> None:
    if not lines:
        path.unlink(missing_ok=True)
        return
    replace_file(path, b"\n".join(lines) + b"\n")


def _collect(section: ReasoningGymSection) -> list[bytes]:
    lines: dict[str, bytes | None] = {}  # by question; None is a problem left out
    good = misses = 0
    for entry in _entries(section):
        if good == section.size or misses == _MISSES:
            break
        misses += 1
        question = entry["question"]
        if question not in lines:
            lines[question] = _line(section, entry)
            if lines[question]:
                good += 1
                misses = 0
    if good < section.size:
        raise ConfigError(
            f"reasoning-gym task {section.name!r} has too few different problems with this config: "
            f"{section.size} wanted, {good} found "
            f"({len(lines) - good} more are not solved by their own answer)",
            hint="reduce size and the two splits in it, or widen the task's config",
        )
    return [line for line in lines.values() if line]


def _line(section: ReasoningGymSection, entry: Mapping[str, Any]) -> bytes | None:
    """Return the entry as a line of JSON; None where its own answer does not score 1.0."""
    if entry["answer"] is None and section.warm_start_size:
        raise ConfigError(
            f"reasoning-gym task {section.name!r} gives no answers to learn from",
            hint="set warm_start_size = 0, or use another task",
        )
    extra = {"metadata": entry["metadata"], "config": dict(section.config)}
    record = {
        "messages": [{"role": "user", "content": entry["question"]}],
        "ground_truth": entry["answer"],
        "data_source": f"{SOURCE_PREFIX}{section.name}",
        "extra": extra,
    }
    try:
        line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise ConfigError(
            f"reasoning-gym task {section.name!r} cannot be written as JSON: {error}"
        ) from error
    if entry["answer"] is None:
        return line
    read = orjson.loads(line)  # as a judge reads it
    answer = read["ground_truth"]
    try:
        score = score_entry(section.name, answer, entry["question"], answer, read["extra"])
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return line if score == 1.0 else None


def _entries(section: ReasoningGymSection) -> Iterator[dict[str, Any]]:
    known = task_datasets()
    if section.name not in known:
        hint = f"{did_you_mean(section.name, known)}see the list of tasks of reasoning-gym"
        raise ConfigError(f"reasoning-gym has no task {section.name!r}", hint=hint)
    if reserved := {"seed", "size"} & set(section.config):
        where = "they are keys of the data set, beside config"
        raise ConfigError(f"config of {section.name!r} sets {sorted(reserved)}", hint=where)
    check_safe(section.name)
    dataset_class, config_class = known[section.name]
    most = (section.size + 1) * (_MISSES + 1)  # `_collect` ends before
    try:
        config = config_class(**section.config, seed=section.seed, size=most)
        dataset = dataset_class(config=config)
    except (TypeError, ValueError, AssertionError) as error:
        message = f"reasoning-gym task {section.name!r} refuses its config: {error}"
        raise ConfigError(
            message, hint=f"it knows {', '.join(config_class.__dataclass_fields__)}"
        ) from error
    yield from dataset
