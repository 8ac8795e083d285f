"""Fingerprints of the data sets and the model of a config, cheap enough for every start.

A large file is known by its size, its first and its last part. Generated data sets and objects of
the user's are known by their settings. What this machine cannot see has no fingerprint: another
process of the run compares it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from buffer.run.origin import Origin, TaskOrigin
from producer_workers.config.dataset import DatasetSection
from producer_workers.hub import model_repository
from rolloutmq.config.config import Config

PART_BYTES = 1 << 18
"""How much of the beginning and of the end of a file is read."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json",
    "tiktoken.model", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
SHAPE = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
"""Keys of config.json in which two models of one family and size agree."""


def origin_of(config: Config, model: Path) -> Origin:
    """Return what a run of this config draws from. `model`: the folder that it starts with."""
    repository = model_repository(config.policy)
    judges = [judge for task in config.tasks.values() for judge in task.attached.values()]
    judged = [each for judge in judges for each in judge.repositories]
    return Origin(
        seed=config.run.seed,
        source=repository and repository.pin,
        tokenizer=files_digest(model / name for name in TOKENIZER_FILES),
        architecture=_architecture(model / "config.json"),
        tasks={
            name: TaskOrigin(
                data=_data(task.dataset, task.split),
                source=task.dataset.repository and task.dataset.repository.pin,
                eval_of=task.eval_of,
                shuffle=task.shuffle,
                prompt_repeat_k=task.prompt_repeat_k,
            )
            for name, task in config.tasks.items()
        },
        models=sorted({each.pin for each in judged if each.pin}),
    )


def _data(section: DatasetSection, split: str | None) -> str | None:
    """Return the fingerprint of a data set, which does not depend on where its files are."""
    settings = section.model_dump(mode="json", exclude={"path", "images"})
    if section.repository:
        # the settings contain the commit
        pin = section.repository.pin
        return pin and _digest(settings, section.repository.id)
    if section.files is None:
        return _digest(settings, *([split] if section.is_generated else []))
    files = [section.files]
    if section.files.is_dir():
        found = [file for file in section.files.rglob("*") if file.suffix in (".arrow", ".parquet")]
        # `datasets` writes caches of its own beside them
        files = sorted(file for file in found if not file.name.startswith(("cache-", ".")))
    content = files_digest(files)
    return content and _digest(settings, content)


def _architecture(file: Path) -> str | None:
    try:
        shape: dict[str, Any] = orjson.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return _digest([shape.get(key) for key in SHAPE])


def files_digest(paths: Iterable[Path]) -> str | None:
    """Return the fingerprint of those files that exist; None if none does."""
    facts = []
    for path in paths:
        if path.is_file() and (content := _file(path)):
            facts.append([path.name, content])
    if not facts:
        return None
    # the name of a single file may change, that of one among several tells them apart
    return facts[0][1] if len(facts) == 1 else _digest(facts)


def _file(path: Path) -> str:
    """Return the fingerprint of a file; "" for one that cannot be read."""
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            head = stream.read(PART_BYTES)
            stream.seek(max(PART_BYTES, size - PART_BYTES))
            return _digest(size, blake2b(head + stream.read(PART_BYTES)).hexdigest())
    except OSError:
        return ""


def _digest(*parts: object) -> str:
    data = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    return blake2b(data, digest_size=8).hexdigest()
