"""The page of all commands, from the typer app."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.main import get_command

from docs.reference.markdown import table, verbatim
from rolloutmq.cli import app
from rolloutmq.command_list import all_commands

INTRODUCTION = """\
# Every command

In the order of `rolloutmq --help`. Questions and the commands that answer them are in
[Commands](commands.md).
"""

TYPES = {bool: "flag", int: "integer", float: "number", str: "text", Path: "path"}


def command_reference() -> str:
    """Return the page of all commands, each with its arguments, options and examples."""
    parts = [INTRODUCTION, verbatim(_epilog(get_command(app)))]
    parts += [_command(name, command) for name, command in all_commands().items()]
    return "\n".join(parts)


def _command(name: str, command: Any) -> str:
    summary = " ".join(inspect.cleandoc(command.help).split("\n\n")[0].split())
    parts = [f"## `rolloutmq {name}`\n", f"{summary}\n"]
    shown = [param for param in command.params if not param.hidden]
    if shown:
        hints = get_type_hints(command.callback)
        rows = [_row(param, hints[param.name]) for param in shown]
        parts.append(table(("argument or option", "type", "default", "meaning"), rows))
    if command.epilog:
        parts.append(verbatim(_epilog(command)))
    return "\n".join(parts)


def _epilog(command: Any) -> str:
    """Return the text after the options; `\\b` in it keeps typer from joining lines."""
    return inspect.cleandoc(command.epilog.replace("\b\n", "")).strip()


def _row(param: Any, annotation: Any) -> tuple[str, str, str, str]:
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
    else:
        names = " / ".join([*param.opts, *param.secondary_opts])
        name = f"{names} {param.metavar or ''}".strip()
    return f"`{name}`", _type(param, annotation), _default(param), param.help or ""


def _type(param: Any, annotation: Any) -> str:
    """Return the type of a value with its limits, for example "integer, at least 1"."""
    is_union = get_origin(annotation) in (Union, UnionType)
    members = [kind for kind in get_args(annotation) if kind is not NoneType] if is_union else []
    kind = members[0] if members else annotation
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    text = TYPES[kind]
    if param.min is not None:
        text += f", at least {param.min}"
    if param.max is not None:
        text += f", at most {param.max}"
    return text + (", repeatable" if param.multiple or param.nargs == -1 else "")


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.default is False:
        return "off"
    if param.default is None or param.default == "":
        return "unset"
    return f"`{json.dumps(param.default, default=str)}`"
