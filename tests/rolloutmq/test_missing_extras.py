from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path

import orjson
import pytest

from buffer.imports import EXTRAS, install_command
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from tests.programs import ROOT, python
from tests.rolloutmq.populate import populate

ABSENT = f"""
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRAS)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
"""
"""As if only the packages of a base install were there."""
PACKAGES = ("buffer", "consumer", "producer_workers", "rolloutmq")
DEMO = str(ROOT / "configs" / "demo.toml")
FRESH = ["--set", "run.name=fresh"]


ABSENT_FOR = {
    "run": (["run", DEMO], "gym"),
    "warm-start": (["warm-start", DEMO], "train"),
    "worker": (["worker", DEMO], "train"),
    "producer": (["producer", DEMO, "--take-over"], "train"),
    "web": (["web"], "web"),
    "export": (["export", "groups.parquet"], "parquet"),
    "train": (["train", DEMO, *FRESH], "train"),  # last: it creates another run
}
"""Commands, and the extra that each lacks."""
COMPLETE = {name: [name] for name in ("status", "ls", "doctor", "metrics", "fsck")}

PROGRAM = """
import contextlib, io, json, sys
from rolloutmq.cli import main

answers = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv = ["rolloutmq", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            answers[name] = (left.code or 0, err)
print(json.dumps({name: (code, err.getvalue()) for name, (code, err) in answers.items()}))
"""
"""All commands one after the other, in a process that cannot import any extra."""


@pytest.fixture(scope="module")
def answers(
    server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """Exit code and errors of each command."""
    folder = tmp_path_factory.mktemp("base-install")
    (folder / "sitecustomize.py").write_text(ABSENT, encoding="utf-8")
    with closing(Store(server.url, deadline_s=400.0)) as store:
        populate(store)
    words = COMPLETE | {name: given for name, (given, _) in ABSENT_FOR.items()}
    path = f"{folder}:{ROOT}"
    given = orjson.dumps(words).decode()
    printed = python("-c", PROGRAM, given, cwd=folder, PYTHONPATH=path, REDIS_URL=server.url)
    return dict(orjson.loads(printed))


def test_every_extra_is_one_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(EXTRAS.values()) <= project["optional-dependencies"].keys()
    assert all("'" in install_command(extra) for extra in EXTRAS.values()), "names no package"


def roots_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def needed_by(distribution: str) -> set[str]:
    names = {distribution}
    for line in metadata.requires(distribution) or ():
        if "extra ==" not in line:
            name = re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
            with suppress(metadata.PackageNotFoundError):  # for another platform
                names |= needed_by(name)
    return names


def test_every_package_that_is_imported_is_of_the_base_install_or_of_a_named_extra() -> None:
    base = needed_by("rolloutmq")
    known = {
        module
        for module, owners in metadata.packages_distributions().items()
        if base.intersection(owner.lower().replace("_", "-") for owner in owners)
    }
    known |= {*sys.stdlib_module_names, *PACKAGES, *EXTRAS}
    foreign = ("rolloutmq/extensions/trainers/", "rolloutmq/init/templates/")
    files = [
        file
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if not str(file.relative_to(ROOT)).startswith(foreign)
    ]
    unknown = {(str(file), root) for file in files for root in roots_of(file) if root not in known}
    assert unknown == set(), "its absence would be told as that of a module"


@pytest.mark.parametrize("name", ABSENT_FOR)
def test_a_command_names_the_extra_that_it_lacks(
    answers: dict[str, tuple[int, str]], name: str
) -> None:
    code, errors = answers[name]
    assert code == 2, errors
    assert install_command(ABSENT_FOR[name][1]) in errors
    assert "Traceback" not in errors
    assert re.match(r"error: .+\n(hint:|  .+ \(pip)", errors)


@pytest.mark.parametrize("name", COMPLETE)
def test_what_needs_no_extra_works(answers: dict[str, tuple[int, str]], name: str) -> None:
    code, errors = answers[name]
    assert code == 0, errors
