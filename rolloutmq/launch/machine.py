"""Check that this machine has what a config needs: packages and GPUs. Takes no second."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from buffer.errors import ConfigError, RolloutMQError
from buffer.imports import EXTRAS, install_command
from rolloutmq.config.config import Config
from rolloutmq.launch.placement import Placement, count_gpus, place


def machine_errors(config: Config) -> list[RolloutMQError]:
    """Return what this machine lacks for a run of `config`."""
    found = [
        ConfigError(f"{key} needs the package {name}, which is not installed", hint=_hint(name))
        for key, name in _packages(config)
        if not _is_installed(name)
    ]
    try:
        placement_of(config)
    except ConfigError as error:
        found.append(error)
    return [*found]


def placement_of(config: Config) -> Placement:
    """Return which GPUs of this machine the processes of a run get. Raises ConfigError."""
    ranks = config.launch.ranks(has_own_loop=config.trainer.loop is not None)
    return place(config.launch, count_gpus(), config.engine.shards, ranks)


def _packages(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the packages that a config needs, each with the key that needs it."""
    learner = config.learner
    if config.trainer.loop is None:
        yield from (("the trainer", name) for name in ("torch", "transformers", "safetensors"))
    if config.engine.package:
        yield f"[engine] kind = {config.engine.kind}", config.engine.package
    loops = {task.agent_loop or config.worker.agent_loop for task in config.tasks.values()}
    if "gateway" in loops:
        yield "agent_loop = gateway", "aiohttp"
    if learner.lora:
        yield "[learner.lora]", "peft"
    if learner.optimizer == "adamw_8bit":
        yield "[learner] optimizer = adamw_8bit", "bitsandbytes"
    for writer in config.trainer.writers:
        yield "[trainer] writers", {"tensorboard": "tensorboardX", "wandb": "wandb"}[writer]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _hint(package: str) -> str:
    extra = EXTRAS.get(package)
    return install_command(extra) if extra else f"pip install {package}"
