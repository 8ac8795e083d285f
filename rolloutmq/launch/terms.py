"""What a step is trained under: config, versions, the user's code and the first weights.

    <run folder>/terms/<digest>.json    the terms; the name is the SHA-256 of the file

The checkpoint names the digest from each step on, so that `rolloutmq prove` can tell them later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from buffer.imports import is_dotted_path, search_in
from buffer.redis.whole_file import replace_file
from rolloutmq.config.config import Config
from rolloutmq.config.fingerprint import files_digest
from rolloutmq.versions import all_versions

FOLDER = "terms"


def terms_of(config: Config, model: Path) -> dict[str, Any]:
    """Return the terms of a trainer that starts now. `model`: the folder of the first weights."""
    values = config.public()
    return {
        "config": values,
        "versions": all_versions(),
        "code": {name: found for name in _functions(values) if (found := source_digest(name))},
        "model": model_digest(model),
    }


def keep_terms(folder: Path, terms: dict[str, Any]) -> str:
    """Write terms into a run's folder, and return their digest."""
    data = orjson.dumps(terms, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)
    digest = hashlib.sha256(data).hexdigest()
    file = folder / FOLDER / f"{digest}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, data)
    return digest


def source_digest(function: str) -> str | None:
    """Return the SHA-256 of the file that defines `module:name`; None where there is none."""
    search_in(Path.cwd())  # as a judge is loaded
    try:
        spec = find_spec(function.partition(":")[0])
        data = Path(spec.origin).read_bytes() if spec and spec.origin else None
    except (ImportError, OSError, ValueError):
        return None
    return None if data is None else hashlib.sha256(data).hexdigest()


def model_digest(model: Path) -> str | None:
    """Return the fingerprint of all files of a model: sizes, first and last parts."""
    return files_digest(sorted(model.glob("*")))


def _functions(tree: Any) -> Iterator[str]:
    """Yield the functions of the user that a config names."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _functions(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _functions(value)
    elif isinstance(tree, str) and is_dotted_path(tree):
        yield tree
