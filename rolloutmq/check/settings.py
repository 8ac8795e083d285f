"""Check the sections of a config against each other, against this machine and against the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from buffer.readable import format_size
from rolloutmq.check.finding import Finding, Level
from rolloutmq.check.machine import count_gpus, machine_errors
from rolloutmq.check.shape import Shape, context_tokens
from rolloutmq.config.config import Config
from rolloutmq.output import plural


def config_findings(config: Config, problems: Sequence[str]) -> Iterator[Finding]:
    """Yield the mistakes of the file, and settings that are allowed but hardly meant."""
    for problem in problems:
        yield Finding("config", "error", problem)
    for warning in config.warnings():
        yield Finding("config", "warning", warning)
    if not problems:
        tasks = plural(len(config.training_tasks), "training task")
        groups = plural(config.plan.batch_size, "group")
        steps = plural(config.plan.steps, "step")
        what = f"run {config.run.name}: {tasks}, {steps} of {groups}, engine {config.engine.kind}"
        yield Finding("config", "ok", what)


def machine_findings(config: Config, gpu_bytes: int | None) -> Iterator[Finding]:
    """Yield what this machine lacks; only warn if it has no GPU, as the run may be elsewhere."""
    gpus = count_gpus()
    found = plural(gpus, "GPU") if gpus else "no GPU"
    size = f"; memory is compared with {format_size(gpu_bytes)}" if gpu_bytes else ""
    yield Finding("machine", "ok", f"{found}{size}")
    for error in machine_errors(config):
        level: Level = "error" if gpus else "warning"
        yield Finding("machine", level, f"{error.message}, so a run cannot start here", error.hint)


def context_findings(config: Config, shape: Shape) -> Iterator[Finding]:
    """Yield why prompts and responses do not fit into the context of the model."""
    asked = getattr(config.engine, "max_model_len", None)
    if config.engine.loads_model and asked and shape.positions and asked > shape.positions:
        yield Finding(
            "model",
            "error",
            f"[engine] max_model_len = {asked:,} exceeds what the model reads, "
            f"{shape.positions:,} tokens: the engine refuses to start",
            f"lower it to {shape.positions}, or use a model with a longer context",
        )
    if asked is None and config.engine.loads_model:
        # where the config names the limit, it was compared when the file was read
        problem = config.context_problem(context_tokens(config), config.tasks)
        if problem:
            yield Finding("model", "error", problem)
    yield from _vocabulary_findings(config, shape)


def _vocabulary_findings(config: Config, shape: Shape) -> Iterator[Finding]:
    """Yield why a trainer would refuse the tokens of an engine."""
    for key, ids in config.engine.token_ids.items():
        if ids > shape.vocabulary:
            has = f"the model has {shape.vocabulary:,} token ids"
            yield Finding(
                "model",
                "error",
                f"[engine] {key} = {getattr(config.engine, key):,}, and {has}: "
                "the trainer would refuse every group",
                f"leave {key} out: the default is the model's",
            )
