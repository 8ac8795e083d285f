"""`rolloutmq eval`: the held-out evaluation of a config on one model, as a short run of its own.

The run NAME-eval, in runs/NAME-eval, has an embedded server, producer and workers, and is removed
at the end; runs/NAME is only read. Problems, sampling, engine and judges are the config's, so
accuracies compare with those that the trainer logged.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson
from rich.console import Console

from buffer.errors import ConfigError, ModelError
from buffer.ledger.position import Position
from buffer.redis.server.embedded import EmbeddedServer
from buffer.run.run import Run
from consumer.grpo.evaluation import log_wait_reason, outcome
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.publication import open_sender, publish
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.step_log import StepWriter, read_evaluations
from rolloutmq.config.config import Config
from rolloutmq.config.load import load_config
from rolloutmq.launch.launcher import Launcher
from rolloutmq.launch.prepare import run_command
from rolloutmq.options import set_flags
from rolloutmq.presets import find_config
from rolloutmq.run_owner import LOCK_FILE, is_owned

ADAPTER = "adapter"  # folder in that of the evaluation: the LoRA adapter to publish over the model
_LOOP = f"{__name__}:evaluate"


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model's metrics by task; `step` is that of its checkpoint, 0 for a model folder."""

    model: str
    step: int
    tasks: dict[str, dict[str, float]]


def evaluate_model(
    config: Config, path: Path, overrides: list[str], what: str, screen: Console
) -> EvaluatedModel:
    """Evaluate the checkpoint or model folder `what` ("": the newest checkpoint).

    `path` and `overrides` gave `config`. Raises ConfigError and ModelError.
    """
    if not config.held_out_tasks:
        raise ConfigError(
            f"{path} has no task for evaluation", hint='add [tasks.NAME] with eval_of = "TASK"'
        )
    step = _find(config, what)
    run_folder = config.run.folder
    folder = config.run.folder.with_name(f"{config.run.folder.name}-eval")
    is_adapter = bool(step and config.learner.lora)
    target = folder / (ADAPTER if is_adapter else "exported")
    given = [*overrides, f"run.name={config.run.name}-eval", f"run.dir={folder}"]
    given += [f"trainer.loop={_LOOP}"]
    # the judges of training tasks may load models
    given += [f"worker.tasks={orjson.dumps(config.held_out_tasks).decode()}"]
    given += [] if config.launch.workers else ["launch.workers=1"]
    if not is_adapter:
        given += [f"policy.model={(target if step else Path(what)).resolve()}"]
    settings = load_config(find_config(path), given)
    _make(folder)
    if step:
        screen.print(f"exporting the checkpoint of step {step} of {run_folder}")
        flags = ["--float32", *set_flags([*overrides, f"run.dir={run_folder}"])]
        run_command(["export-model", str(path), str(step), str(target), *flags])
    # a server of its own, even where REDIS_URL or the config names another
    with EmbeddedServer(folder / "server") as server:
        launcher = Launcher(
            settings, path, given, redis_url=server.url, screen=screen,
            exit_when_stuck=True, is_reported=False,
        )  # fmt: skip
        launcher.run()
    found = {task: metrics for (task, _), metrics in read_evaluations(folder).items()}
    shutil.rmtree(folder)
    return EvaluatedModel(f"{run_folder}, step {step}" if step else what, step, found)


def _make(folder: Path) -> None:
    """Make the folder, and delete what an interrupted evaluation left."""
    if is_owned(folder):
        raise ConfigError(
            f"another evaluation runs in {folder}", hint=f"`rolloutmq logs -f --run-dir {folder}`"
        )
    if (folder / LOCK_FILE).exists():
        EmbeddedServer(folder / "server").kill()  # one that outlived its owner
        shutil.rmtree(folder)
    elif folder.exists():
        raise ConfigError(f"{folder} exists and is no evaluation", hint="move it away")
    folder.mkdir(parents=True)
    (folder / LOCK_FILE).touch()


def _find(config: Config, what: str) -> int:
    """Return the step of a checkpoint of the run; 0 for a model folder. Raises ModelError."""
    if what and (Path(what) / "config.json").is_file():
        return 0
    steps = CheckpointFolder(config.run.folder / "checkpoints").steps()
    if steps and (not what or what in map(str, steps)):
        return int(what or steps[-1])
    known = ", ".join(map(str, steps)) or "none"
    raise ModelError(
        f"{config.run.folder} has no checkpoint {f'of step {what}' if what else 'yet'}",
        hint=f"its checkpoints: {known}; or give a folder with config.json",
    )


def evaluate(run: Run, config: Config, model_dir: Path, *, take_over: bool = False) -> None:
    """Evaluate all held-out tasks in place of the trainer, with training jobs paused."""
    consumer = RolloutConsumer(run)
    consumer.open(position=Position(), take_over=take_over)
    adapter = config.run.folder / ADAPTER
    if adapter.is_dir():
        copy = partial(shutil.copytree, adapter, dirs_exist_ok=True, copy_function=shutil.copyfile)
        publish(consumer, open_sender(config, run), 0, copy, pause="abort")
    consumer.pause("abort", lanes="eval")
    log = StepWriter(config.run.folder)
    for task in config.held_out_tasks:
        found = consumer.evaluate(task, config.evaluation_size(task), waiting=log_wait_reason)
        metrics = outcome(found, leaves_out_failed=config.leaves_out_failed(task))
        log.add_evaluation(0, task, metrics)
    consumer.finish()
    consumer.close()
