from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.programs import ROOT, files_of_git, python

DOCKER = ROOT / "docker"
STAGE = re.compile(r"^FROM .*?(?=^FROM |\Z)", re.MULTILINE | re.DOTALL)


def instructions(stage: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, arguments) of a stage, in order."""
    text = re.sub(r"^#.*\n", "", stage, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        yield word, rest


def context() -> set[str]:
    """Return the files that `docker build` sees: those of git that are not ignored."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    names = [path.relative_to(ROOT).as_posix() for path in files_of_git()]
    return {n for n in names if n.split("/")[0] not in ignored and n not in ignored}


def copy(files: set[str], names: list[str], target: Path) -> None:
    for name in names:
        found = [file for file in files if file == name or file.startswith(f"{name}/")]
        assert found, f"COPY {name}: no such file in the context"
        for file in found:
            place = target / (Path(file).name if file == name else Path(file).relative_to(name))
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, place)


def run(folder: Path, *words: str) -> str:
    return python(*words, cwd=folder, PYTHONPATH="")


@pytest.mark.slow
def test_each_layer_has_the_files_that_its_set_up_needs(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    files = context()
    (build, _) = STAGE.findall((DOCKER / "Dockerfile").read_text(encoding="utf-8"))
    set_ups = 0
    for word, rest in instructions(build):
        if word == "COPY":
            *names, target = rest.split()
            copy(files, names, app / target)
        elif word == "RUN" and "bootstrap.py" in rest:
            set_ups += 1
            # what `pip install --editable .`, the last step of bootstrap.py, has hatchling build
            run(app, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", str(tmp_path / "d"))
            known = run(
                app, "-c", "import bootstrap as b; print(b.LOCK, b.CPU_HASHES, b.CUDA_LOCK)"
            )
            assert all(Path(name).is_file() and name.startswith(str(app)) for name in known.split())
    assert set_ups == 1
    shown = run(
        app,
        "-c",
        "import rolloutmq, rolloutmq.presets as p; print(rolloutmq.__file__, p.presets_folder())",
    )
    assert all(name.startswith(str(app)) for name in shown.split())
    assert "Usage" in run(app, "-m", "rolloutmq", "--help")


FAKE = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $*" >> started
exec sleep 600
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder that is a host's: its volume, and a `rolloutmq` that notes its GPU and waits."""
    (tmp_path / "runs").mkdir()
    command = tmp_path / "rolloutmq"
    command.write_text(FAKE, encoding="utf-8")
    command.chmod(0o755)
    return tmp_path


def test_each_worker_of_a_host_gets_a_gpu_of_its_own(host: Path) -> None:
    """The command of compose.gpu.yaml, in as many processes as replicas."""
    service = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text(encoding="utf-8"))
    entry = service["services"]["worker"]["entrypoint"]
    assert entry[:2] == ["tini", "--"]
    words = [word.replace("$$", "$").replace("/work/runs", f"{host}/runs") for word in entry[2:]]
    environment = os.environ | {"WORKER_GPUS": "1,2,3", "PATH": f"{host}:{os.environ['PATH']}"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([*words, "worker", "c.toml"], cwd=host, env=environment, stderr=-3)

    def started(count: int, ended: subprocess.Popen[bytes]) -> list[str]:
        log = host / "started"
        while not log.exists() or len(log.read_text().splitlines()) < count:
            assert ended.poll() is None, "it ended instead"
        return log.read_text().splitlines()

    workers = [start()]
    try:
        for count in (1, 2):
            started(count, workers[-1])
            workers.append(start())
        assert sorted(started(3, workers[-1])) == [f"{gpu} worker c.toml" for gpu in (1, 2, 3)]
        assert start().wait(400) != 0, "there is no fourth GPU"
        workers[1].kill()
        workers[1].wait()
        workers.append(start())
        assert started(4, workers[-1])[3] == started(4, workers[-1])[1]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
