"""Assign the GPUs of this machine to processes, and check that it has what a config needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from buffer.errors import ConfigError, RolloutMQError
from buffer.imports import EXTRAS, attached, install_command, is_there, load_object
from consumer.config.trainer import METRIC_WRITERS
from producer_workers.agent_loops.agent_loop import has_agents, load_class
from producer_workers.config.attached_judge import OwnEngine
from producer_workers.config.task import attached_kinds
from rolloutmq.config.config import Config, LaunchSection

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of the trainer and of each worker, as indexes of those that this process may use."""

    trainer: list[int]
    workers: list[list[int]]

    @staticmethod
    def environment(gpus: list[int]) -> dict[str, str]:
        """Return the environment of a process that may use only `gpus`."""
        names = visible_gpus()
        return {VISIBLE: ",".join(names[g] if names else str(g) for g in gpus)} if gpus else {}


def visible_gpus() -> list[str] | None:
    """Return the names of the GPUs that this process may use; None if it may use all."""
    given = os.environ.get(VISIBLE)
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]


def count_gpus() -> int:
    """Count the NVIDIA GPUs that this process may use, without importing torch."""
    given = visible_gpus()
    return len(_ask_gpus("name")) if given is None else len(given)


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU that this process may use; None without a GPU."""
    sizes = [int(line) << 20 for line in _ask_gpus("memory.total") if line.isdigit()]
    return min(sizes, default=None)


def gpu_names() -> str:
    """Return the kinds of GPUs in this machine; "none" without a GPU."""
    return ", ".join(sorted(set(_ask_gpus("name")))) or "none"


def _ask_gpus(field: str) -> list[str]:
    """Return what nvidia-smi says of each GPU; nothing if this process may use none."""
    if visible_gpus() == [] or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return [line.strip() for line in listing.splitlines()]


def place(launch: LaunchSection, gpus: int, per_worker: int = 1, ranks: int = 1) -> Placement:
    """Assign `gpus` to processes. Raises ConfigError for too few GPUs.

    `ranks`: of the trainer.
    """
    if gpus == 0:
        if launch.trainer_gpus or launch.worker_gpus:
            hint = "start it on a machine with GPUs, or remove trainer_gpus and the like"
            raise ConfigError("[launch] names GPUs, but this machine has none", hint=hint)
        return Placement([], [[] for _ in range(launch.workers)])
    trainer = list(range(ranks)) if launch.trainer_gpus is None else launch.trainer_gpus
    others = list(range(gpus)) if launch.colocated else [g for g in range(gpus) if g not in trainer]
    pool = others if launch.worker_gpus is None else launch.worker_gpus
    if unknown := sorted({g for g in trainer + pool if not 0 <= g < gpus}):
        raise ConfigError(f"[launch] names GPUs {unknown}, but this machine has 0 to {gpus - 1}")
    if (shared := sorted(set(trainer) & set(pool))) and not launch.colocated:
        raise ConfigError(
            f"trainer and workers use the same GPUs {shared}",
            hint="use different ones, or set [launch] colocated = true and leave memory for both",
        )
    if len(set(pool)) < len(pool) and not launch.colocated:
        raise ConfigError(
            f"[launch] worker_gpus = {pool} names a GPU twice",
            hint="each worker needs GPUs of its own",
        )
    needed = launch.workers * per_worker
    if len(pool) < (min(per_worker, needed) if launch.colocated else needed):
        raise ConfigError(
            f"[launch] workers = {launch.workers} of {per_worker} GPUs need {needed}, but "
            f"{len(pool)} are left for them",
            hint="use fewer workers, smaller parallel sizes in [engine], or [launch] "
            "colocated = true on one GPU",
        )
    groups = [pool[i * per_worker : (i + 1) * per_worker] for i in range(len(pool) // per_worker)]
    # colocated workers may share one set of GPUs; otherwise each has its own
    return Placement(trainer, [groups[i % len(groups)] for i in range(launch.workers)])


def machine_errors(config: Config) -> list[RolloutMQError]:
    found = [
        ConfigError(
            f"{key} needs the package {name}, which is not installed",
            hint=install_command(EXTRAS[name]) if name in EXTRAS else f"pip install {name}",
        )
        for key, name in _packages(config)
        if not is_there(name)
    ]
    sections = [section.check for section in config.attached.values()]
    for check in (partial(placement_of, config), *sections):
        try:
            check()
        except ConfigError as error:
            found.append(error)
    return [*found]


def engines_of_judges(config: Config) -> dict[str, OwnEngine]:
    """Return the engines that each worker starts for attached judges, by name."""
    kinds = attached_kinds(config.tasks)
    return {name: own for kind in kinds for name, own in kind.engines(config).items()}


def placement_of(config: Config) -> Placement:
    """Return the GPUs of this machine for each process of a run. Raises ConfigError."""
    ranks = config.launch.ranks(has_own_loop=config.trainer.loop is not None)
    shards = [own.settings.shards for own in engines_of_judges(config).values()]
    return place(config.launch, count_gpus(), max(config.engine.shards, *shards, 1), ranks)


def _packages(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the packages that a config needs, each with the key that needs it."""
    learner = config.learner
    if config.trainer.loop is None:
        yield from (("the trainer", name) for name in ("torch", "transformers", "safetensors"))
    engines = {"[engine]": config.engine} | {
        f"the engine of {name},": own.settings for name, own in engines_of_judges(config).items()
    }
    for where, engine in engines.items():
        if engine.package:
            yield f"{where} kind = {engine.kind}", engine.package
    for loop in sorted({task.loop(config.worker.agent_loop) for task in config.tasks.values()}):
        if has_agents(loop):
            with suppress(ConfigError):  # one that cannot be imported is reported as a function
                for module in load_class(loop).needs:
                    yield f"agent_loop = {loop}", module.partition(".")[0]
    if learner.lora:
        yield "[learner.lora]", "peft"
    if learner.optimizer == "adamw_8bit":
        yield "[learner] optimizer = adamw_8bit", "bitsandbytes"
    known = attached(METRIC_WRITERS)
    for name in config.trainer.writers:
        yield "[trainer] writers", load_object(known[name], kind="metric writer").package
