"""The commands of the training side: `run`, `create`, `train`, and those of models and GPUs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from buffer.errors import INTERRUPTED
from consumer.handle.checkpoint import CheckpointFolder
from producer_workers.follow_owner import follow_owner
from rolloutmq.command_list import command
from rolloutmq.config.sources import fetch
from rolloutmq.options import (
    RUNS,
    AsJson,
    ConfigPath,
    ConfigUrl,
    MetricsAddress,
    Overrides,
    RunDir,
    server_flags,
    set_flags,
)
from rolloutmq.output import age, console, emit, table
from rolloutmq.presets import open_config
from rolloutmq.process_log import log_json
from rolloutmq.run_owner import Stage, choose_folder, interrupt, is_owned, read_record

TakeOver = Annotated[bool, Option("--take-over", help="Fence another trainer that is still alive.")]
Regenerate = Annotated[
    bool,
    Option(
        "--regenerate",
        help="Clear what the server has of the run, and generate again what the newest checkpoint "
        "does not prove. For a server that lost a part of the run, or all of it.",
    ),
]
ExitWhenStuck = Annotated[
    bool,
    Option(
        "--exit-when-stuck",
        help="End with exit code 5 where the trainer needs a task that was stopped after too many "
        "failures, instead of waiting until it is resumed. For batch systems.",
    ),
]
Detach = Annotated[
    bool,
    Option(
        "--detach", "-d", help="Return once the run is under way; it continues in the background."
    ),
]


EVAL_EPILOG = """
\b
Examples: rolloutmq eval configs/demo.toml
          rolloutmq eval configs/demo.toml 40
          rolloutmq eval configs/demo.toml models/mine --json
"""
RUN_EPILOG = """
\b
Examples: rolloutmq run configs/demo.toml --set plan.steps=20
          rolloutmq run configs/demo.toml --detach
"""


@command("run", epilog=RUN_EPILOG)
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    regenerate: Regenerate = False,
    exit_when_stuck: ExitWhenStuck = False,
    detach: Detach = False,
) -> None:
    """Start a whole run on this machine, or continue it.

    Starts a server, the producer, the workers and the trainer, and shows them live. Ctrl-C or
    `rolloutmq stop` stops them in order: the trainer writes a checkpoint, workers return what they
    hold; so does the end of the terminal, unless it was started with nohup. A second Ctrl-C kills
    them. The same command continues the run. A run that needs a stopped task waits until it is
    resumed (`rolloutmq resume --task NAME`, or the browser).
    """
    given = list(overrides or [])
    settings = open_config(config, given)
    if detach:
        arguments = [str(config), *set_flags(given)]
        arguments += ["--regenerate"] if regenerate else []
        arguments += ["--exit-when-stuck"] if exit_when_stuck else []
        arguments += ["--redis-url", redis_url] if redis_url else []
        where = server_flags(settings.redis.resolve_url(redis_url), settings.run.folder)
        raise typer.Exit(_start_detached(arguments, settings.run.folder, where))
    from rolloutmq.launch.launcher import Launcher

    Launcher(
        settings, config, given, redis_url=redis_url,
        regenerate=regenerate, exit_when_stuck=exit_when_stuck,
    ).run()  # fmt: skip


@command("create", epilog="Example: rolloutmq create configs/demo.toml")
def create(
    config: ConfigPath,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make the run of a config on its server, and start nothing.

    Checks config and data sets, builds the model if the config names none, and prints what to start
    next. If the run exists, it takes over the settings of the config.
    """
    given = list(overrides or [])
    settings = open_config(config, given)
    from rolloutmq.launch.create import create_and_describe

    facts, lines = create_and_describe(settings, config, given, redis_url, quiet=as_json)
    if as_json:
        emit(facts)
    for line in [] if as_json else lines:
        typer.echo(line)


@command("train", epilog="Example: rolloutmq train configs/demo.toml --take-over")
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    take_over: TakeOver = False,
    regenerate: Regenerate = False,
    exit_when_stuck: ExitWhenStuck = False,
    metrics: MetricsAddress = None,
) -> None:
    """Start the trainer of a run, or one rank of it.

    It trains from its newest checkpoint to the last step; SIGTERM makes it write a checkpoint and
    exit. What the server lost since the checkpoint is restored from it; nothing is trained twice.
    With torchrun it is one of several ranks: torchrun --nproc-per-node 8 -m rolloutmq train CONFIG.
    """
    settings = fetch(open_config(config, overrides))
    from rolloutmq.launch import training

    rank = training.own_rank()
    log_json("trainer", settings.run.name, f"trainer-{rank}" if rank else "")
    follow_owner()
    run, model_dir = training.open_run(
        settings, redis_url, metrics, take_over=take_over, regenerate=regenerate
    )
    run.task_stops.are_final = exit_when_stuck
    if not training.train(run, settings, model_dir, take_over=take_over):
        # stopped before its last step: the launcher must not take that for the end of the run
        raise typer.Exit(INTERRUPTED)


@command("warm-start", epilog="Example: rolloutmq warm-start configs/demo.toml")
def warm_start(config: ConfigPath, overrides: Overrides = None) -> None:
    """Build and warm-start the small model of a config.

    The warm start is a short supervised phase on separate problems; the model is kept in the run's
    folder.
    """
    from rolloutmq.config.small_model import small_model

    settings = open_config(config, overrides)
    follow_owner()
    small_model(settings).make()


@command("export-model", epilog="Example: rolloutmq export-model configs/demo.toml 40 out")
def export(
    config: ConfigPath,
    step: Annotated[int, Argument(min=1, metavar="STEP", help="A step with a checkpoint.")],
    folder: Annotated[Path, Argument(metavar="FOLDER", help="New folder of the model.")],
    float32: Annotated[
        bool, Option("--float32", help="Write the numbers as trained, not in bfloat16.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    Its number of ranks does not matter. With [learner.lora] the folder is an adapter.
    """
    settings = fetch(open_config(config, overrides))
    from consumer.grpo.export import export_model

    export_model(
        settings, settings.model_folder, step, folder, "float32" if float32 else "bfloat16"
    )


@command("eval", epilog=EVAL_EPILOG)
def evaluate(
    config: ConfigPath,
    checkpoint: Annotated[
        str,
        Argument(
            metavar="CHECKPOINT",
            help="Step of a checkpoint, or a model folder. Default: the newest checkpoint.",
        ),
    ] = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint or a model on the held-out tasks of a config.

    It starts workers, judges and an embedded server of its own on this machine, as `rolloutmq run`
    does, in the folder RUN-eval, which it removes at the end. The run itself is only read, and may
    continue meanwhile if there is room for both.
    """
    given = list(overrides or [])
    settings = fetch(open_config(config, given))
    from rolloutmq.launch.evaluation import evaluate_model

    screen = console(stderr=as_json)
    found = evaluate_model(settings, config, given, checkpoint, screen)
    if as_json:
        emit({"model": found.model, "step": found.step or None, "tasks": found.tasks})
        return
    console().print(f"\nheld-out accuracy of {found.model}")
    names = list(dict.fromkeys(name for metrics in found.tasks.values() for name in metrics))
    grid = table("task", *(name.removeprefix("eval/") for name in names), right=names)
    for task, metrics in sorted(found.tasks.items()):
        grid.add_row(task, *(f"{metrics[name]:.4g}" if name in metrics else "-" for name in names))
    console().print(grid)


@command("gpu-check", epilog="Example: rolloutmq gpu-check --steps 3")
def gpu_check(
    steps: Annotated[int, Option("--steps", min=1, help="Number of train steps.")] = 3,
    overrides: Overrides = None,
) -> None:
    """Check the pipeline on one CUDA GPU.

    Trains a few GRPO steps of a Qwen3-0.6B-shaped model with random weights, and prints what was
    measured.
    """
    from rolloutmq.launch.gpu_check import check_gpu

    check_gpu(steps, overrides or [])


EPILOG = """
\b
Examples: rolloutmq stop
          rolloutmq stop --run-dir runs/demo --now
"""

POLL_S = 0.2
Now = Annotated[
    bool,
    Option("--now", help="As a second Ctrl-C: kill its processes. The newest checkpoint is kept."),
]


@command("stop", epilog=EPILOG)
def stop(now: Now = False, run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Stop a run that `rolloutmq run` started, and wait for its end.

    It does what Ctrl-C does: the trainer writes a checkpoint, workers return what they hold, the
    run's own server stops last. The same `rolloutmq run` continues it. Ctrl-C here only ends the
    wait. Without --run-dir, it is the running one under ./runs.
    """
    folder = choose_folder(run_dir, RUNS)
    begin = time.monotonic()
    before = interrupt(folder, at_once=now)
    if not as_json:
        how = "at once" if now else "in order"
        console().print(f"run {before.run} in {folder}: stopping {how} (process {before.pid})")
    shown = ""
    while is_owned(folder):
        record = read_record(folder)
        is_stopping = record and record.stage is Stage.STOPPING
        if record and is_stopping and record.detail not in ("", shown) and not as_json:
            shown = record.detail
            console().print(f"  {shown}")
        time.sleep(POLL_S)
    took_s = time.monotonic() - begin
    record = read_record(folder) or before
    steps = CheckpointFolder(folder / "checkpoints").steps()
    step = steps[-1] if steps else 0
    if as_json:
        facts = record.model_dump(include={"run", "stage", "steps", "detail", "account"})
        emit(facts | {"checkpoint": step, "took_s": round(took_s, 3)})
    elif record.stage is Stage.FINISHED:
        console().print(f"run {record.run} had just finished all {record.steps} steps")
    else:
        # `set` may have raised the number of steps since the start
        of = f" of {record.steps}" if step <= record.steps else ""
        done = f"at step {step}{of}" if step else "before its first checkpoint"
        rest = "".join(f"; {part}" for part in (record.detail, record.account) if part)
        said = f"run {record.run} {record.stage} {done}, after {age(took_s * 1000)}{rest}"
        console().print(said, soft_wrap=True)
    if record.stage in (Stage.FAILED, Stage.DIED):
        sys.exit(1)


def _start_detached(arguments: list[str], folder: Path, where: str) -> int:
    """Start `rolloutmq run` in a session of its own, and print what it prints.

    Returns 0 once trainer, producer and a worker have joined, or on Ctrl-C; else the exit code of
    the ended run. `where`: the options by which other commands find the run.
    """
    log = folder / "logs" / "run.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name("run.log.1"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rolloutmq", "run", *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    screen = console()
    try:
        is_running = False
        with log.open(encoding="utf-8", errors="replace") as lines:
            while not is_running:
                code = process.poll()
                record = read_record(folder)
                for line in lines:
                    screen.print(line.rstrip("\n"), soft_wrap=True)
                if code is not None:
                    return code if code >= 0 else 1
                if record and record.pid == process.pid:
                    is_running = record.stage is Stage.RUNNING
                time.sleep(0.3)
    except KeyboardInterrupt:
        pass  # it continues without this process
    if process.poll() is not None:
        return 0
    screen.print(f"\nthe run continues in the background (process {process.pid}):")
    commands = {
        f"rolloutmq status --follow {where}": "watch it live",
        f"rolloutmq logs -f --run-dir {folder}": "follow the logs of its processes",
        f"rolloutmq stop --run-dir {folder}": "stop it in order; the same run command continues it",
    }
    width = max(map(len, commands))
    for words, what in commands.items():
        screen.print(f"  {words:<{width}}  {what}", soft_wrap=True)
    return 0
