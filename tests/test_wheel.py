from __future__ import annotations

import re
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT, build_wheel, files_of_git, printed, python

PACKAGES = ("rolloutmq", "buffer", "consumer", "producer_workers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the wheel's content, as an installer lays it out."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(site: Path, *words: str) -> str:
    far = site.parent / "far"
    far.mkdir(exist_ok=True)
    return python(*words, cwd=far, PYTHONPATH=str(site))


def test_the_same_sources_make_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    """In another folder, with other times and another umask."""
    for source in files_of_git():
        copy = tmp_path / source.relative_to(ROOT)
        if copy.relative_to(tmp_path).parts[0] not in ("tests", "proofs", "benchmarks"):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            copy.chmod(0o600)
    assert build_wheel(tmp_path, tmp_path / "dist").read_bytes() == wheel.read_bytes()


def test_nothing_is_missing_and_nothing_else_is_in_it(site: Path) -> None:
    shipped = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    presets = {f"rolloutmq/{name}" for name in map(_relative, (ROOT / "configs").rglob("*.toml"))}
    expected = set(map(_relative, files_of_git(*PACKAGES)))
    assert expected <= shipped
    assert presets <= shipped
    others = {name for name in shipped - expected if not re.match(r"rolloutmq(-.*dist-info/|/configs/)", name)}  # fmt: skip
    assert others == set()


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


STRANGER = """
import pathlib, buffer, consumer, producer_workers, rolloutmq
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.wire.rollout import FIRST_WEIGHTS
from buffer.run.run import Run
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.presets import presets_folder
from rolloutmq.web.app import STATIC

packages = (buffer, consumer, producer_workers, rolloutmq)
print(*{pathlib.Path(package.__file__).parents[1] for package in packages})
print(presets_folder(), (STATIC / "page.html").is_file())
with EmbeddedServer(pathlib.Path("server")) as server:
    limits = RunLimits(tasks={"math": TaskLimits()})
    store = Store(server.url)
    run = Run.create(store, "w", new_nonce(), limits, FIRST_WEIGHTS, "/w")
    print(len(run.account.totals().faults))
    store.close()
"""


@pytest.mark.slow
def test_the_installed_packages_run_without_the_checkout(site: Path) -> None:
    place, files, faults = run_installed(site, "-c", STRANGER).splitlines()
    assert place == str(site)
    assert files == f"{site}/rolloutmq/configs True"
    assert faults == "0"
    assert "rolloutmq" in run_installed(site, "-m", "rolloutmq", "--version")


def test_extras_are_in_the_metadata_and_all_has_every_one_but_the_engines(site: Path) -> None:
    (metadata,) = site.glob("rolloutmq-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    given = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    extras = PROJECT["optional-dependencies"]
    assert given == set(extras)
    (everything,) = extras["all"]
    named = re.fullmatch(r"rolloutmq\[(.*)\]", everything)
    assert named is not None
    assert set(named[1].split(",")) == set(extras) - {"all", "dev", "vllm-cpu", "vllm-cuda"}


CONSUMER = """
import pathlib, sys
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.wire.rollout import FIRST_WEIGHTS
from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq import RolloutConsumer, Run, Store

with EmbeddedServer(pathlib.Path("server")) as server:
    limits = RunLimits(tasks={"math": TaskLimits()})
    store = Store(server.url)
    run = Run.create(store, "w", new_nonce(), limits, FIRST_WEIGHTS, "/w")
    consumer = RolloutConsumer(run)
    consumer.open()
    print(len(consumer.take_batch(1, {"math": 0}).groups), "torch" in sys.modules)
    consumer.close()
    store.close()
"""

REHEARSAL = """
from rolloutmq import rehearse

def judge(*, response, ground_truth, state):
    return 0.5

(group,) = rehearse([{"question": "2 + 2 = ?", "answer": "4"}], judge=judge)
print(group.scores.tolist())
"""


@pytest.mark.slow
def test_the_wheel_installs_into_an_empty_environment_and_does_what_readme_says(
    wheel: Path, tmp_path: Path
) -> None:
    """Install it with its dependencies from the package index, and without torch."""
    python("-m", "venv", tmp_path / "venv")

    def run(*words: str) -> str:
        return printed(tmp_path / "venv/bin/python", *words, cwd=tmp_path, PYTHONPATH="")

    # without compiling: half of the time, and nothing here runs twice
    run("-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}[testing]")
    assert run("-c", CONSUMER) == "0 False\n"
    assert "Usage" in run("-m", "rolloutmq", "worker", "--help")
    assert run("-c", REHEARSAL) == "[0.5, 0.5]\n"
    missing = "from buffer.imports import install_command as c; print(c('http'))"
    assert "aiohttp" in run("-c", missing)
