"""The page of all config keys, from the models of `buffer.config`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ByteSize, TypeAdapter

from buffer.config.section import Section, meanings
from buffer.run.settings import LiveSettings
from docs.reference.markdown import table
from producer_workers.config.task import named_judges
from rolloutmq.config.config import Config

Schema = Mapping[str, Any]
"""A JSON schema, or a part of one, as pydantic makes it."""

CONFIG_INTRODUCTION = """\
# Every key of a config

How a config file is put together, with examples, is in [Configs](../../configs/README.md). Where
the default is "unset", the meaning states what happens then.
"""

LIVE_INTRODUCTION = """\
## `rolloutmq set`

What can be changed while a run continues, as `name=value`. It belongs to the run until it is set
again, or until the run is started with a config in which the value has changed.
"""


def config_reference() -> str:
    """Return the page of all config sections, of the judges with a name, and of live settings."""
    schema = Config.model_json_schema()
    parts = [CONFIG_INTRODUCTION]
    for name, field in schema["properties"].items():
        texts = [_section(*found, schema) for found in _sections(name, field, schema)]
        parts += dict.fromkeys(texts)  # kinds of data sets share their subsection
    judges = [(f'`"{name}"`', judge.meaning) for name, judge in named_judges().items()]
    parts.append("## Judges with a name\n\n" + table(("judge", "scores"), judges))
    live = LiveSettings.model_json_schema()
    parts.append(LIVE_INTRODUCTION + "\n" + _keys(live, live, has_defaults=False))
    task = _keys(live["$defs"]["LiveTaskSettings"], live, has_defaults=False)
    parts.append("Of a training task, as `tasks.<name>.<key>=value`:\n\n" + task)
    return "\n".join(parts)


def _sections(name: str, field: Schema, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Find the sections in a field: itself and those inside of it, each under its dotted name."""
    field = _resolve(field, schema)
    values = [field.get("additionalProperties"), *field.get("patternProperties", {}).values()]
    if any(values) and (named := _NAMED.get(name.rpartition(".")[2])):
        name, field = f"{name}.<{named}>", next(filter(None, values))
    for member in _members(field):
        definition = _resolve(member, schema)
        if not _is_section(definition):
            continue
        yield name, definition
        for key, inner in definition["properties"].items():
            # [tasks.<name>.strategy] has the keys of [strategy], a teacher's engine of [engine]
            if key not in ("strategy", "engine"):
                yield from _sections(f"{name}.{key}", inner, schema)


_NAMED = {"tasks": "name", "teachers": "teacher"}  # tables of sections, and what names each


def _is_section(definition: Schema) -> bool:
    return "properties" in definition and definition["title"] in _section_types()


def _subclasses(base: type[Section]) -> Iterator[type[Section]]:
    for found in base.__subclasses__():
        yield found
        yield from _subclasses(found)


@cache
def _section_types() -> dict[str, type[Section]]:
    """Return the sections by name; call it once the schema is made, which imports what attaches."""
    return {found.__name__: found for found in _subclasses(Section)}


def _members(field: Schema) -> Sequence[Schema]:
    members: Sequence[Schema] = field.get("oneOf", field.get("anyOf", [field]))
    return members


def _resolve(field: Schema, schema: Schema) -> Schema:
    reference = field.get("$ref")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else field


def _section(name: str, definition: Schema, schema: Schema) -> str:
    kind = definition["properties"].get("kind", {}).get("const")
    title = f"`[{name}]`" + (f" of kind {kind}" if kind else "")
    summary = definition.get("description", "").split("Usage:")[0].strip()
    summary = re.sub(r"^\[[^:]*: ", "", summary)  # the name of the section is in the title
    summary = summary[:1].upper() + summary[1:]
    return f"## {title}\n\n{summary}\n\n{_keys(definition, schema)}"


def _keys(definition: Schema, schema: Schema, *, has_defaults: bool = True) -> str:
    required = definition.get("required", ())
    header = ["key", "type", "default", "meaning"]
    rows = [header]
    docs = meanings(_section_types()[definition["title"]])
    for key, field in sorted(definition["properties"].items(), key=lambda item: item[0] != "kind"):
        default = _default(key, field, required)
        meaning = docs.get(key) or _resolve(field, schema).get("description", "")  # attached
        rows.append([f"`{key}`", _type(field, schema), default, meaning.rpartition("]: ")[2]])
    if not has_defaults:
        rows = [[key, kind, meaning] for key, kind, _, meaning in rows]
    return table(rows[0], rows[1:])


def _default(key: str, field: Schema, required: Sequence[str]) -> str:
    if key in required:
        return "required"
    value = field.get("default")
    if value is None or isinstance(value, dict):
        return "unset"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(field: Schema, schema: Schema) -> str:
    """Return the type of a key with its limits, for example "integer, at least 1"."""
    return " or ".join(dict.fromkeys(_simple_types(field, schema)))


def _simple_types(field: Schema, schema: Schema) -> Iterator[str]:
    if field.get("anyOf") == _BYTE_SIZE["anyOf"]:
        yield "bytes"
    elif "$ref" in field:
        yield from _simple_types(_resolve(field, schema), schema)
    elif "anyOf" in field or "oneOf" in field:
        for member in _members(field):
            yield from _simple_types(member, schema)
    elif "enum" in field or "const" in field:
        values = field.get("enum", [field.get("const")])
        yield ", ".join(f"`{json.dumps(value)}`" for value in values)
    elif field.get("type") != "null":
        yield _bounded(field, schema)


_BYTE_SIZE = TypeAdapter(ByteSize).json_schema()
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "multiple of",
}
_TYPES = {"path": "path", "boolean": "true or false", "object": "table", "array": "list"}


def _bounded(field: Schema, schema: Schema) -> str:
    name: str = field.get("format", field.get("type", "any"))
    text: str = _TYPES.get(name, name)
    if name == "array" and "items" in field:
        text = f"list of {_type(field['items'], schema)}"
    bounds = [f"{words} {field[bound]}" for bound, words in _BOUNDS.items() if bound in field]
    return ", ".join([text, *bounds])
