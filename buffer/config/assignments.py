"""Settings from text: `section.key=value` assignments, checked strictly by a pydantic model.

A TOML string is not a number, and one error names every mistake.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json

from buffer.config.removed import removed_setting
from buffer.errors import ConfigError
from buffer.redis.url import mask_url

M = TypeVar("M", bound=BaseModel)

FIXED = "x-fixed"
"""Key of a section's JSON schema: the names of what cannot change while a run continues, and why.
"""

_SIZE = 'expected a number of bytes, or text like "8GiB" or "500MB"'
_MESSAGES = {"byte_size": _SIZE, "byte_size_unit": _SIZE}
"""By type of pydantic's error, where its own message says too little."""

Location = Sequence[str | int]

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
    text = override.partition("=")[2].strip()
    # a shell removes the quotes around a word, so a word without them is a string
    try:
        document = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise nested("--set") from None
    except ValueError:  # no TOML, or a number with thousands of digits
        document = {}
    node[key] = document["value"] if len(document) == 1 else text


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


# -- mistakes, by dotted path, value and what was expected -----------------------------


def describe_problems(
    model: type[BaseModel], tree: Mapping[str, Any], error: ValidationError
) -> list[str]:
    """Return one line per mistake, in the order of the model. `tree`: the file as it was read.

    pydantic locates an error in the model: a location may contain members of unions, and values
    that were copied from another section, which the file does not have. Locations are translated
    back to the file; the known keys are read from the model's JSON schema.
    """
    found = [
        _locate(tree, details)
        for details in error.errors(include_url=False)
        if details["type"] != "default_factory_not_called"  # follows from another mistake
    ]
    # a section that was completed from another one repeats the mistakes of that one
    written = [problem for problem in found if problem.is_written] or found
    return list(dict.fromkeys(_describe(model, problem) for problem in written))


@dataclass(frozen=True, slots=True)
class _Problem:
    details: ErrorDetails
    path: list[str | int]
    got: Any
    is_written: bool


def _locate(tree: Mapping[str, Any], details: ErrorDetails) -> _Problem:
    node: Any = tree
    path: list[str | int] = []
    *parents, last = details["loc"] or ("",)
    for part in parents:
        if _has(node, part):
            node = node[part]
            path.append(part)
        elif isinstance(node, dict) and part not in node.values():
            # a value among the siblings would be the tag of a union's member
            return _Problem(details, [*path, part], details["input"], is_written=False)
    if details["type"] == "missing":
        return _Problem(details, [*path, last], None, is_written=True)
    if _has(node, last):
        return _Problem(details, [*path, last], node[last], is_written=True)
    is_here = last in ("[key]", "") or not isinstance(node, dict) or last in node.values()
    return _Problem(details, path if is_here else [*path, last], details["input"], is_here)


def _has(node: Any, part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node


def _describe(model: type[BaseModel], problem: _Problem) -> str:
    where = _dotted(problem.path) or "the file"
    context = problem.details.get("ctx", {})
    tag = f"{where}.{context.get('discriminator', '')}".replace("'", "")
    if instead := removed_setting(where, _shorten(problem.got)):
        return f"{where}: {instead}"
    match problem.details["type"]:
        case "missing":
            return f"{where}: missing; this key is required"
        case "extra_forbidden":
            return f"{where}: {_suggest(model, problem.details['loc'])}"
        case "union_tag_invalid":
            return f"{tag} = {_shorten(context['tag'])}: expected {context['expected_tags']}"
        case "union_tag_not_found":
            return f"{tag}: missing; this key is required"
    got = "" if isinstance(problem.got, dict) else f" = {_shorten(problem.got)}"
    # "expected a valid integer" for pydantic's "Input should be a valid integer"
    said = _MESSAGES.get(problem.details["type"], problem.details["msg"])
    expected = re.sub(r"^Input should be ", "expected ", said.removeprefix("Value error, "))
    return f"{where}{got}: {mask_url(expected)}"


def _dotted(path: Location) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            quoted = part if re.fullmatch(r"[\w-]+", part) else to_json(part).decode()
            text += f".{quoted}" if text else quoted
    return text


def _shorten(value: Any) -> str:
    text = mask_url(to_json(value, inf_nan_mode="constants", fallback=str).decode())
    return text if len(text) <= 80 else f"{text[:79]}…"


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _suggest(model: type[BaseModel], location: Location) -> str:
    schema = _schema(model)
    *parents, last = location
    node = _descend(schema, parents)
    key = str(last)
    if why := node.get(FIXED, {}).get(key):
        return f"cannot change while a run continues: {why}"
    if kind := _suggest_kind(schema, parents, key):
        return f"unknown key{kind}"
    known = list(node.get("properties", {}))
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"unknown key; did you mean `{close[0]}`?"
    for name in schema.get("properties", {}):
        if key in _descend(schema, (name,)).get("properties", {}):
            return f"unknown key; it belongs in [{name}]"
    return f"unknown key; known here: {', '.join(known)}" if known else "unknown key"


def _suggest_kind(schema: Mapping[str, Any], parents: Location, key: str) -> str:
    """Return which other kind of the same section has the key; "" if none has."""
    if not parents:
        return ""
    *section, kind = parents
    union = _descend(schema, section).get("discriminator", {})
    for other, reference in union.get("mapping", {}).items():
        if key in _resolve(schema, {"$ref": reference}).get("properties", {}):
            field = union["propertyName"]
            where = _dotted(section)
            return (
                f'; it belongs to {field} = "{other}", and {where} has {field} = "{kind}": '
                f"remove it, or replace the section: --set '{where}={{{field}=\"{kind}\"}}'"
            )
    return ""


def _descend(schema: Mapping[str, Any], location: Location) -> dict[str, Any]:
    """Return the schema at a pydantic location; {} where it has no names."""
    node = _resolve(schema, dict(schema))
    for part in location:
        node = _resolve(schema, _child(node, part))
    return node


def _child(node: Mapping[str, Any], part: str | int) -> dict[str, Any]:
    tags: dict[str, str] = node.get("discriminator", {}).get("mapping", {})
    if isinstance(part, str) and part in tags:
        return {"$ref": tags[part]}
    if part in node.get("properties", {}):
        return dict(node["properties"][part])
    inner = node.get("items" if isinstance(part, int) else "additionalProperties")
    return dict(inner) if isinstance(inner, dict) else {}


def _resolve(schema: Mapping[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    while True:
        members = [member for member in node.get("anyOf", []) if member.get("type") != "null"]
        if reference := node.get("$ref"):
            node = schema["$defs"][reference.rpartition("/")[2]]
        elif len(members) == 1:
            node = members[0]
        else:
            return node
