"""`rolloutmq run --detach`, looked at, stopped, continued, finished and evaluated, as one history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from rolloutmq.run_owner import Stage, read_record
from tests.pipeline.site import Site
from tests.rolloutmq.conftest import rolloutmq


@pytest.fixture
def site(tmp_path: Path, tiny_model: Path) -> Iterator[Site]:
    opened = Site(tmp_path, tiny_model, steps=80)
    yield opened
    rolloutmq("stop", "--now", "--run-dir", str(opened.run_dir))
    opened.close()


def files_of(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_in_the_background_is_stopped_continued_finished_and_evaluated(site: Site) -> None:
    where = ("--run-dir", str(site.run_dir))
    code, said = site.command("run", "--detach")
    assert code == 0, said
    for words in ("trainer loads the model", f"rolloutmq stop --run-dir {site.run_dir}"):
        assert words in said
    record = read_record(site.run_dir)
    assert record
    assert (record.stage, record.steps) == (Stage.RUNNING, 80)

    site.until_step(4)
    assert "trainer" in rolloutmq("logs", "trainer", "-n", "5", *where).stdout
    done = rolloutmq("stop", *where)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "lost 0 · in two places 0" in told
    assert not site.server.is_running
    step = site.history().steps[-1].step
    assert 4 <= step < 80
    assert f"at step {step} of 80" in told  # what was trained is in the checkpoint

    code, said = site.command("run", "--set", f"plan.steps={step + 3}")
    assert code == 0, said
    assert [row.step for row in site.history().steps] == list(range(1, step + 4))
    record = read_record(site.run_dir)
    assert record
    assert record.stage is Stage.FINISHED
    assert site.audit().clean

    before = files_of(site.run_dir)
    # a model folder: that a checkpoint becomes one is tested elsewhere
    code, said = site.command("eval", str(site.model), "--set", "tasks.held.eval_of=sums", "--json")
    assert code == 0, said
    told = orjson.loads(said[said.index("{\n") :])
    assert (told["model"], told["step"]) == (str(site.model), None)
    assert told["tasks"]["held"]["eval/groups"] == 40
    assert files_of(site.run_dir) == before
    assert not (site.folder / "run-eval").exists()
