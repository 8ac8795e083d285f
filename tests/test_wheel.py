"""The wheel, built twice, installed into a folder, and used from there as a stranger would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rolloutmq", "buffer", "consumer", "producer_workers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def build(source: Path, target: Path) -> Path:
    """Build the wheel of a source folder as `make wheel` does."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1750000000"}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the wheel's content, as an installer lays it out."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(site: Path, *words: str) -> str:
    """Run Python far from the checkout, with the installed packages before all others."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL")
    }
    far = site.parent / "far"
    far.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=far, env=environment | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_sources_make_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    """In another folder, with other times and another umask."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)  # fmt: skip
    for name in listed.stdout.splitlines():
        if (source := ROOT / name).is_file() and name.split("/")[0] not in ("tests", "benchmarks"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, tmp_path / name)
            (tmp_path / name).chmod(0o600)
    assert build(tmp_path, tmp_path / "dist").read_bytes() == wheel.read_bytes()


def test_nothing_is_missing_and_nothing_else_is_in_it(site: Path) -> None:
    shipped = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)  # fmt: skip
    presets = {f"rolloutmq/{name}" for name in map(_relative, (ROOT / "configs").rglob("*.toml"))}
    expected = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
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
from buffer.run import Run
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
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [python, *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    # without compiling: half of the time, and nothing here runs twice
    run("-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}[testing]")
    assert run("-c", CONSUMER) == "0 False\n"
    assert "Usage" in run("-m", "rolloutmq", "worker", "--help")
    assert run("-c", REHEARSAL) == "[0.5, 0.5]\n"
    missing = "from buffer.imports import install_command as c; print(c('http'))"
    assert "aiohttp" in run("-c", missing)
