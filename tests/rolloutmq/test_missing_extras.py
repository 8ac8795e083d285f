"""Without its extras, every command names the one that is missing, in one line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from buffer.model.extras import EXTRAS
from buffer.server.embedded import EmbeddedServer
from tests.rolloutmq.conftest import ROOT, rolloutmq
from tests.rolloutmq.populate import Scene

ABSENT = f"""
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRAS)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
"""
"""As if only the packages of a base install were there."""
DEMO = str(ROOT / "configs" / "demo.toml")
FRESH = ["--set", "run.name=fresh"]


@pytest.fixture
def base_install(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that cannot import any extra."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT, encoding="utf-8")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_every_extra_is_one_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(EXTRAS.values()) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["run", DEMO], "gym"),
        (["problems", DEMO], "gym"),
        (["warm-start", DEMO], "train"),
        (["train", DEMO, *FRESH], "train"),
        (["worker", DEMO], "train"),
        (["producer", DEMO, "--take-over"], "train"),
        (["web"], "web"),
        (["export", "groups.parquet"], "parquet"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else words,
)
def test_a_command_names_the_extra_that_it_lacks(
    words: list[str],
    extra: str,
    scene: Scene,
    server: EmbeddedServer,
    base_install: dict[str, str],
    tmp_path: Path,
) -> None:
    done = rolloutmq(*words, cwd=tmp_path, **base_install, REDIS_URL=server.url)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'rolloutmq[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert re.match(r"error: .+\n(hint:|  .+ \(pip)", done.stderr)


@pytest.mark.parametrize("words", [["status"], ["ls"], ["doctor"], ["metrics"], ["fsck"]], ids=str)
def test_what_needs_no_extra_works(
    words: list[str], scene: Scene, server: EmbeddedServer, base_install: dict[str, str]
) -> None:
    done = rolloutmq(*words, cwd=ROOT, **base_install, REDIS_URL=server.url)
    assert done.returncode == 0, done.stderr
