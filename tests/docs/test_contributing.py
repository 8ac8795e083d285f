from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import ROOT, files_of_git

PRODUCT = ("buffer", "consumer", "producer_workers", "rolloutmq")
COPIED = (*PRODUCT, "configs", "tests", "examples", "pyproject.toml", "CONTRIBUTING.md")
CHECKS = "tests/docs/recipe_checks.py"

_STEP = re.compile(
    r"^(?:In|A new file,) `(?P<file>[^`]+)`(?:, below `(?P<below>[^`]+)`|, (?P<end>at the end))?:\n\n```\w+\n(?P<code>.*?)^```$",
    re.M | re.S,
)


class Step(NamedTuple):
    file: str
    code: str
    below: str | None
    is_at_end: bool

    def carry_out(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text("utf-8") if path.exists() else ""
        if self.is_at_end:
            text = f"{text}\n\n{self.code}"
        elif self.below is None:
            assert not text, f"{self.file} is there already"
            text = self.code
        else:
            lines = text.splitlines(keepends=True)
            (at,) = [n for n, line in enumerate(lines) if line == self.below + "\n"]
            text = "".join([*lines[: at + 1], self.code, *lines[at + 1 :]])
        path.write_text(text, "utf-8")


def recipes() -> Iterator[tuple[str, list[Step]]]:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for recipe in text.partition("## Twelve usual changes")[2].split("\n### ")[1:]:
        found = [
            Step(step["file"], step["code"], step["below"], bool(step["end"]))
            for step in _STEP.finditer(recipe)
        ]
        assert len(found) == recipe.count("```") // 2, recipe
        yield recipe.partition("\n")[0], found


@pytest.mark.parametrize(("name", "steps"), [*recipes()])
def test_a_usual_change_touches_at_most_three_files_of_the_product(
    name: str, steps: list[Step]
) -> None:
    assert 1 <= len({step.file for step in steps}) <= 3


def test_the_recipes_work_in_a_copy(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for source in files_of_git(*COPIED):
        target = copy / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    for _, steps in recipes():
        for step in steps:
            step.carry_out(copy)
    attach(copy)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", CHECKS)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def attach(copy: Path) -> None:
    project = tomllib.loads((copy / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    facts = copy / "rolloutmq-0.0.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rolloutmq\nVersion: 0.0.0\n", "utf-8"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in groups.items()
    ]
    (facts / "entry_points.txt").write_text("\n".join(lines), "utf-8")
