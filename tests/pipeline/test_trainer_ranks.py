"""Several ranks of the trainer, by `rolloutmq run`, by torchrun, and in pods: one is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest
import yaml

from consumer.handle.step_log import read_evaluations
from tests.pipeline.site import ROOT, Process, Site


def rank_of(launcher: Process, rank: int) -> psutil.Process:
    found = [
        child
        for child in psutil.Process(launcher.pid).children()
        if child.name() == f"train {rank}" or child.environ().get("RANK") == str(rank)
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.slow
def test_a_run_survives_a_killed_rank_and_stops_in_order(make_site: Callable[..., Site]) -> None:
    """The next life continues with as many ranks as it likes: tests/consumer/handle/test_ranks.py."""
    site = make_site(steps=1000, held=0)
    run = site.start("run", "--set", "launch.trainer_ranks=2")
    site.reach(3)
    site.let(1)
    rank_of(run, 1).kill()
    site.until(lambda: "trainer restarted" in run.said(), "a restart of all ranks")
    assert "trainer rank 1 was killed by SIGKILL" in run.said()
    site.steps = site.reach(1)
    assert run.end(signal.SIGINT) == 130, run.said()
    assert "the same command continues the run" in run.said()
    # both ranks ended in order, and rank 0 wrote a checkpoint of its last step
    assert (site.run_dir / f"checkpoints/step-{site.steps:06d}/trainer.json").exists()
    site.check()


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_when_one_dies(make_site: Callable[..., Site]) -> None:
    """Evaluations are exclusive, and the trainer waits until the role of the dead one is vacant."""
    site = make_site(steps=9, held=0)
    with site.config.open("a", encoding="utf-8") as config:
        config.write(
            """
[tasks.held_out]
eval_of = "sums"
[tasks.held_out.dataset]
kind = "jsonl"
path = "{folder}/problems.jsonl"
[evaluation]
every_steps = 3
groups = 4
flow = "exclusive"
""".replace("{folder}", str(site.folder))
        )
    text = site.config.read_text(encoding="utf-8")
    site.config.write_text(
        text.replace("max_staleness = 1", 'max_staleness = 1\npause_mode = "abort"'),
        encoding="utf-8",
    )
    site.server.start()
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = ["-m", "rolloutmq", "train", str(site.config)]
    trainer = site.start_module("torch.distributed.run", *options, *command)
    site.start("producer")
    site.start("worker", "--id", "w0")
    site.reach(3)
    site.let_go()
    rank_of(trainer, 1).kill()
    assert trainer.wait() == 0, site.words()
    assert set(read_evaluations(site.run_dir)) == {("held_out", step) for step in (0, 3, 6, 9)}
    site.check()


def pod_command(pod: int) -> list[str]:
    component = ROOT / "docker/kubernetes/trainer_ranks/kustomization.yaml"
    (patch,) = yaml.safe_load(component.read_text(encoding="utf-8"))["patches"]
    command: list[str]
    (command,) = [
        change["value"]
        for change in yaml.safe_load(patch["patch"])
        if change["path"].endswith("/command")
    ]
    assert command[:3] == ["tini", "--", "torchrun"]
    known = {"$(JOB_COMPLETION_INDEX)": str(pod), "trainer-0.trainer": "127.0.0.1"}
    for name, value in known.items():
        command = [word.replace(name, value) for word in command]
    return command[3:]


@pytest.mark.slow
def test_pods_are_ranks_of_one_trainer_and_drained_ones_ask_to_be_replaced(
    make_site: Callable[..., Site],
) -> None:
    """Kubernetes replaces what fails; what succeeds has seen the end of the run."""
    site = make_site(steps=6, held=0)
    site.server.start()
    pods = [
        site.start_module("torch.distributed.run", *pod_command(pod), "train", str(site.config))
        for pod in (0, 1)
    ]
    drained = [site.start("producer"), site.start("worker", "--id", "w0")]
    site.reach(1)
    assert [process.end(signal.SIGTERM) for process in drained] == [130, 130]
    site.let_go()
    replaced = [site.start("producer", "--take-over"), site.start("worker", "--id", "w1")]
    assert [pod.wait() for pod in pods] == [0, 0], site.words()
    assert [process.wait() for process in replaced] == [0, 0]
    site.check()
