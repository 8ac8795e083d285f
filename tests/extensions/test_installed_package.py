"""The package of docs/pages/extensions.md, built as a wheel and installed where it is not known."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT, build_wheel

PAGE = ROOT / "docs" / "pages" / "extensions.md"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for language, name, text in re.findall(
        r'```(toml|python) title="([\w./]+)"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.S
    ):
        assert language
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    place = folder / "environment"
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    for wheel in (build_wheel(ROOT, folder / "ours"), build_wheel(source, folder / "theirs")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    others = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "others.pth").write_text(f"{others}\n")
    return place


def said(environment: Path, program: str, **settings: str) -> str:
    done = subprocess.run(
        [environment / "bin" / "python", "-c", program],
        cwd=environment,
        env={"PATH": "/usr/bin:/bin", "HOME": str(environment), **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


JUDGE = """
import asyncio, buffer
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import TaskSection
from producer_workers.judges.load import load_worker_judge

given = {"judge": "palindrome", "dataset": {"kind": "jsonl", "path": "none"}}
task = TaskSection.model_validate(given)

async def score(text):
    judge = load_worker_judge("palindrome", task.judging)
    try:
        return (await judge.judge(RolloutState(response=text)))["score"]
    finally:
        judge.close()

if __name__ == "__main__":
    print(buffer.__file__)
    print(asyncio.run(score("level")), asyncio.run(score("lever")))
"""


def test_its_judge_has_a_name_in_a_config(environment: Path) -> None:
    (environment / "use.py").write_text(JUDGE)
    place, scores = said(environment, "import runpy; runpy.run_path('use.py', run_name='__main__')").splitlines()  # fmt: skip
    assert place.startswith(str(environment))
    assert scores == "1.0 0.0"


OBSERVER = """
import pathlib
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, Status, VersionSpan
from rolloutmq import RolloutConsumer
from rolloutmq.config.config import Config
from rolloutmq.observers import observed

config = Config.model_validate({
    "run": {"name": "w", "dir": "run"},
    "policy": {"model": "/w"},
    "engine": {"kind": "simulated"},
    "tasks": {"math": {"judge": "exact_match", "dataset": {"kind": "jsonl", "path": "none"}}},
})
with EmbeddedServer(pathlib.Path("server")) as server:
    store = Store(server.url)
    limits = RunLimits(tasks={"math": TaskLimits()})
    run = Run.create(store, "w", new_nonce(), limits, FIRST_WEIGHTS, "/w")
    with observed(run, "trainer", config):
        consumer = RolloutConsumer(run)
        consumer.open()
        state = RolloutState(
            prompt_ids=[1],
            response_ids=[5],
            logprobs=[-0.5],
            spans=[VersionSpan(0, 1, FIRST_WEIGHTS.version, FIRST_WEIGHTS.lineage)],
            status=Status.COMPLETED,
            reward={"score": 1.0},
        )
        run.buffer.put("math", [[state]])
        consumer.take_batch(1, {"math": 1})
        consumer.close()
    store.close()
"""


def test_its_observer_sees_what_the_trainer_takes(environment: Path) -> None:
    file = environment / "sizes"
    said(environment, OBSERVER, BATCH_SIZES=str(file))
    assert file.read_text() == "1 1\n"
