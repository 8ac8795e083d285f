"""Find all commands, and import only the one that is called.

Importing all takes most of a second at each `--help`: names and summaries are read from the text of
the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

from buffer.config.removed import COMMANDS

SETTINGS = {"help_option_names": ["-h", "--help"]}

SECTIONS = ("Run", "Look", "Steer", "Data", "Administration")  # of `--help`, in this order
_HERE = Path(__file__).parent
_PLACES = ("cli/*.py", "*/command*.py")
_COMMAND = re.compile(
    r'^@command\(\s*"(\w+)",\s*"([\w-]+)".*?^def .*?"""(.+?)(?:\n\n|""")', re.MULTILINE | re.DOTALL
)
_FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {}
F = TypeVar("F", bound=Callable[..., Any])


class CommandPlace(NamedTuple):
    """Where a command is, and the first sentence of its help."""

    section: str
    module: str
    summary: str


def command(section: str, name: str, *, epilog: str) -> Callable[[F], F]:
    """Make a function the command `name`, in a section of `--help`; its docstring is its help."""
    assert section in SECTIONS

    def mark(function: F) -> F:
        _FUNCTIONS[name] = (function, epilog)
        return function

    return mark


@cache
def command_places() -> dict[str, CommandPlace]:
    """Return all commands by name, in the order of `--help`, without importing one."""
    found = {}
    for file in (path for pattern in _PLACES for path in _HERE.glob(pattern)):
        module = ".".join(file.relative_to(_HERE.parent).with_suffix("").parts)
        for section, name, summary in _COMMAND.findall(file.read_text(encoding="utf-8")):
            found[name] = CommandPlace(section, module, " ".join(summary.split()))
    order = sorted(found, key=lambda name: (SECTIONS.index(found[name].section), name))
    return {name: found[name] for name in order}


class LazyGroup(TyperGroup):
    """Imports a command only when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(command_places())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return open_command(cmd_name) if cmd_name in command_places() else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands: Any = command_places()  # the names that typer suggests for a wrong one
        options = (each.partition("=")[0] for each in args[1:])
        for name in (*args[:1], *(f"{args[0]} {option}" for option in options)):
            if instead := COMMANDS.get(name):
                ctx.fail(f"{name} was removed: {instead}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title in SECTIONS:
            places = command_places().items()
            rows = [(name, place.summary) for name, place in places if place.section == title]
            with formatter.section(title):
                formatter.write_dl(rows)


def all_commands() -> dict[str, Any]:
    return {name: open_command(name) for name in command_places()}


@cache
def open_command(name: str) -> Any:
    import_module(command_places()[name].module)
    function, epilog = _FUNCTIONS[name]
    app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=SETTINGS)
    app.command(name, epilog=epilog)(function)
    return get_command(app)
