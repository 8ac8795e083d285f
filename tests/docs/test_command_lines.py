"""Every `rolloutmq …` that a page, a config or a message prints can be typed as it stands."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import typer

from rolloutmq.cli import UsageError
from rolloutmq.command_list import all_commands
from rolloutmq.config.load import load_config

ROOT = Path(__file__).parents[2]
FOLDERS = ("buffer", "producer_workers", "consumer", "rolloutmq", "docker", "configs", "docs")
FILES = [
    # CONTRIBUTING.md adds a command, which test_contributing.py uses
    *(page for page in ROOT.glob("*.md") if page.name != "CONTRIBUTING.md"),
    *(
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in (".md", ".py", ".toml", ".yaml", ".yml", ".json")
    ),
]
COMMANDS = all_commands()
IN_TICKS = re.compile(r"`(rolloutmq [a-z][^`]*)`")
LINE = re.compile(r"^(?: {4}|- |\$ )?(rolloutmq [a-z][^`|]*?)$", re.MULTILINE)


def command_lines(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        yield from LINE.findall(text)
        yield from IN_TICKS.findall(text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            # 7 can be a number, a name and a path
            parts = [str(p.value) if isinstance(p, ast.Constant) else "7" for p in node.values]
            yield from IN_TICKS.findall("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from IN_TICKS.findall(node.value)


def parse(line: str) -> tuple[str, list[str]]:
    """Return the command and its arguments, without placeholders for more and the shell's part."""
    line = re.sub(r"\{\{.*?\}\}", "X", line.replace("…", "").replace("STEP", "7"))
    line = re.sub(r"\[[^\]]*\]", "", line)
    words = shlex.split(re.split(r" (?:&|&&|>) ?", line.replace("\\", ""))[0], comments=True)
    return words[1], words[2:]


def fault(line: str) -> str:
    """Return why the command would refuse the line; "" if it would not."""
    name, args = parse(line)
    if name not in COMMANDS:
        return f"there is no command {name!r}"
    try:
        COMMANDS[name].make_context(name, list(args))
    except UsageError as error:
        # text that names a command alone leaves out what it works on
        return "" if type(error).__name__ == "MissingParameter" else str(error)
    except typer.Exit:  # --help
        return ""
    for config in (ROOT / word for word in args if word.endswith(".toml")):
        if config.exists():
            given = [value for flag, value in pairwise(args) if flag == "--set"]
            load_config(config, given)
    return ""


def test_every_printed_command_can_be_typed() -> None:
    lines = [(str(file.relative_to(ROOT)), line) for file in FILES for line in command_lines(file)]
    assert len(lines) > 200
    faults = [(file, line, why) for file, line in lines if (why := fault(line))]
    assert faults == []
    assert fault("rolloutmq status --help") == ""
    assert "No such option" in fault("rolloutmq status --halp")
