"""Settings from text: `section.key=value` assignments, checked strictly by a pydantic model.

A TOML string is not a number, and one error names every mistake.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from buffer.config.problems import describe_problems
from buffer.errors import ConfigError
from buffer.redis.connection.url import mask_url

M = TypeVar("M", bound=BaseModel)

MOST_DEPTH = 64
"""Levels of tables and arrays in a config; parsers and checks recurse into them."""


def parse_settings(model: type[M], assignments: Sequence[str]) -> M:
    """Return `model` made from assignments like "max_staleness=2".

    Raises ConfigError, which names every wrong assignment.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        assign(tree, assignment)
    return validate(model, tree, "settings")


def validate(
    model: type[M],
    tree: Mapping[str, Any],
    where: str,
    more_problems: Callable[[], Iterable[str]] = tuple,
) -> M:
    """Return `model` made from `tree`, the values of a file or of assignments at `where`.

    Raises ConfigError, which names every wrong value, and `more_problems` after them.
    """
    require_plain(tree, where)
    try:
        # through JSON, because only there pydantic's strict mode accepts paths and enums as text
        return model.model_validate_json(to_strict_json(tree), strict=True)
    except ValidationError as error:
        found = [*describe_problems(model, tree, error), *more_problems()]
        lines = list(dict.fromkeys(found))
        count = f"{len(lines)} problem{'s' * (len(lines) > 1)}"
        raise ConfigError("\n  ".join([f"{where}: {count}", *lines])) from None


def to_strict_json(value: Any) -> bytes:
    """Return what pydantic's strict mode reads for a value of TOML."""
    return to_json(value, inf_nan_mode="constants")


def require_plain(tree: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a text with the character NUL, and for values that are nested deep."""
    left: list[tuple[Any, int]] = [(tree, 0)]
    while left:
        value, depth = left.pop()
        if depth > MOST_DEPTH:
            raise nested(where)
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{where}: a text contains the character NUL", hint="remove \\u0000")
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else []
        parts += value if isinstance(value, list) else []
        left += [(part, depth + 1) for part in parts]


def nested(where: str) -> ConfigError:
    """Return the error of values at `where` that are nested too deep."""
    return ConfigError(
        f"{where}: values are nested more than {MOST_DEPTH} deep", hint="remove them"
    )


def assign(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `tree`. Raises ConfigError where it is not one."""
    try:
        override.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--set {mask_url(override)!a}: not a text in UTF-8") from error
    *sections, key = key_path(override)
    node = tree
    for name in sections:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"--set {mask_url(override)}: `{name}` is a value, not a section, and has no keys"
            )
    node[key] = _parse_value(override.partition("=")[2].strip())


def key_path(override: str) -> list[str]:
    """Return the parts of the key of an assignment. Raises ConfigError where it is none."""
    key, equals, _ = override.partition("=")
    try:
        if not equals or "\n" in key:
            raise ValueError(key)
        node: Any = tomllib.loads(f"{key} = 0")
    except ValueError as error:  # TOMLDecodeError is one
        raise ConfigError(
            f"--set {mask_url(override)}: expected section.key=value, "
            "for example lease.lease_ms=5000"
        ) from error
    path = []
    while isinstance(node, dict):
        name, node = next(iter(node.items()))
        path.append(name)
    return path


def _parse_value(text: str) -> Any:
    """Return the TOML value of `text`, or `text` itself where it is none."""
    # a shell removes the quotes around a word, so a word without them is a string
    try:
        document = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise nested("--set") from None
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
