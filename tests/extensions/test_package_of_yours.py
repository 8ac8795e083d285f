"""Packages add a judge to tasks (that of docs/pages/your_judge.md, from its wheel) and a kind of data set."""

from __future__ import annotations

import asyncio
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from buffer.config.attached import attached_types
from buffer.errors import ConfigError
from buffer.imports import attached
from buffer.wire.rollout import FIRST_WEIGHTS
from producer_workers.build import column_judges
from producer_workers.config.dataset import DatasetSection
from producer_workers.config.engine import EngineConfig
from producer_workers.datasets.open import open_dataset
from producer_workers.engines import build_engine
from producer_workers.judges.watched_judges import WatchedJudges
from rolloutmq.config.config import Config
from rolloutmq.config.load import validate_config
from tests.pipeline.conftest import make_yard, quick_looks
from tests.programs import ROOT, build_wheel

__all__ = ["make_yard", "quick_looks"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("brevity")
    page = (ROOT / "docs/pages/your_judge.md").read_text("utf-8")
    for name in ("brevity.py", "pyproject.toml"):
        (code,) = re.findall(rf'^```\w+ title="{name}"\n(.*?)^```$', page, re.M | re.S)
        (folder / name).write_text(code, encoding="utf-8")
    with zipfile.ZipFile(build_wheel(folder, folder / "dist")) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(autouse=True)
def looked_up_again() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    for cache in (attached, attached_types):
        cache.cache_clear()


def config_of(**values: Any) -> Config:
    dataset = {"kind": "jsonl", "path": "none.jsonl"}
    task = {"judge": "exact_match", "dataset": dataset, **values}
    return validate_config({"run": {"name": "r"}, "tasks": {"sums": task}}, "my_run.toml")


def test_its_columns_and_numbers_are_in_the_groups_that_workers_submit(
    wheel: Path, make_yard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(wheel)
    yard = make_yard()
    config = config_of(brevity={"per_token": 0.5})
    watched = WatchedJudges()
    judges = column_judges(config, ["sums"], watched)["sums"]

    async def scenario() -> str:
        (gid,) = yard.enqueue(1, tokens=(2,))
        async with yard.working(yard.worker(judges=watched, column_judges=judges)):
            await yard.until_stages(completed=1)
        return str(gid)

    for state in yard.group(asyncio.run(scenario())).states:
        assert state.token_rewards.tolist() == [-0.5, -0.5]
        assert state.reward.keys() == {"score", "cost"}
        assert state.reward["cost"] == -1.0
    yard.check()


def test_its_key_is_checked_as_others_and_unknown_without_it(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.sums\.brevity: unknown"):
        config_of(brevity={})
    monkeypatch.syspath_prepend(wheel)
    forget()
    with pytest.raises(ConfigError, match=r'tasks\.sums\.brevity\.per_token = "much"'):
        config_of(brevity={"per_token": "much"})
    with pytest.raises(ConfigError, match=r"tasks\.sums\.brevity\.per_word: unknown"):
        config_of(brevity={"per_word": 1})


def test_a_key_that_two_packages_attach_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 0.1\n")
    (other / "entry_points.txt").write_text("[rolloutmq.judges]\nbrevity = other:Other\n")
    for folder in (wheel, tmp_path):
        monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError, match="two packages attach 'brevity'"):
        config_of(brevity={})


SQUARES = """
from typing import Literal

from producer_workers.config.dataset import DatasetKind
from producer_workers.config.engine import EngineSettings
from producer_workers.datasets.records import RecordsDataset, problem_of


class Squares(DatasetKind):
    reader = "squares:open_squares"

    kind: Literal["squares"]
    size: int = 3


def open_squares(section, problems_dir, split, seed):
    rows = [{"question": f"{n} * {n}", "answer": str(n * n)} for n in range(section.size)]
    return RecordsDataset(rows, "squares", problem_of)


class Squaring(EngineSettings):
    built_by = "squares:build"

    kind: Literal["squaring"]


def build(section, folder, version):
    return f"an engine of {version}"
"""


@pytest.fixture
def squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a kind of data set and a kind of engine."""
    info = tmp_path / "squares-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: squares\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[rolloutmq.datasets]\nsquares = squares:Squares\n"
        "[rolloutmq.engines]\nsquaring = squares:Squaring\n"
    )
    (tmp_path / "squares.py").write_text(SQUARES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("squares")
def test_a_kind_of_data_set_is_checked_and_opened(tmp_path: Path) -> None:
    kinds = TypeAdapter[DatasetSection](DatasetSection)
    rows = open_dataset(kinds.validate_python({"kind": "squares", "size": 5}), tmp_path)
    assert (len(rows), rows.row(4).ground_truth) == (5, "16")
    with pytest.raises(ValidationError, match=r"expected tags: 'jsonl'.*'squares'"):
        kinds.validate_python({"kind": "cubes"})


@pytest.mark.usefixtures("squares")
def test_a_kind_of_engine_is_built_as_its_section_says(tmp_path: Path) -> None:
    section = TypeAdapter[EngineConfig](EngineConfig).validate_python({"kind": "squaring"})
    built: Any = build_engine(section, tmp_path, FIRST_WEIGHTS)
    assert built == f"an engine of {FIRST_WEIGHTS}"
