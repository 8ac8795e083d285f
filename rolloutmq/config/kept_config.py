"""What a run was started with, in `config.json` of its folder: each key, its value, its source.

The file of the config may change, or lie where the folder is read from; this one does not. It has
no value that may be secret, and is written at each start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from buffer.config.assignments import assign
from buffer.redis.url import mask_url
from buffer.redis.whole_file import replace_file
from rolloutmq.config.config import Config
from rolloutmq.config.load import read_tree

FILE = "config.json"


class KeptKey(NamedTuple):
    """One key of a config, such as "plan.steps". `source`: default, file or --set."""

    name: str
    value: Any
    source: str


def keep_config(config: Config, origin: Path | Sequence[KeptKey], overrides: Sequence[str]) -> None:
    """Write the config of a start into the run's folder.

    `origin`: the file that it was read from, or the keys of another run; `overrides` came on top.
    """
    on_top: dict[str, Any] = {}
    for override in overrides:
        assign(on_top, override)
    if isinstance(origin, Path):
        given = dict.fromkeys(_names(read_tree(origin)), "file")
    else:
        given = {key.name: key.source for key in origin}
    given |= dict.fromkeys(_names(on_top), "--set")
    keys = [
        (name, _masked(value), _source(name, given)) for name, value in _leaves(config.public())
    ]
    replace_file(config.run.folder / FILE, orjson.dumps(keys, option=orjson.OPT_INDENT_2))


def read_config(folder: Path) -> list[KeptKey]:
    """Return the keys of the newest start; [] where the folder has none that can be read."""
    try:
        kept = orjson.loads((folder / FILE).read_bytes())
        return [KeptKey(str(name), value, str(source)) for name, value, source in kept]
    except (OSError, ValueError, TypeError):
        return []


def differences(folders: Mapping[str, Path]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values differ between runs, and their values; None: it has no such.

    A run whose folder has no config differs in none.
    """
    configs = [{key.name: key.value for key in read_config(path)} for path in folders.values()]
    known = [each for each in configs if each]
    names = sorted({name for each in known for name in each} - {"run.name", "run.dir"})
    return [
        (name, [each.get(name) for each in configs])
        for name in names
        if any(each.get(name) != known[0].get(name) for each in known)
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _names(tree: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, _ in _leaves(tree))


def _masked(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return mask_url(value) if isinstance(value, str) else value


def _source(name: str, given: Mapping[str, str]) -> str:
    """Return where a key is from: what was given for it, or for a table that contains it."""
    parts = name.split(".")
    above = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((given[each] for each in above if each in given), "default")
