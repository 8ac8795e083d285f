"""A whole job of verl in Ray, started as users do, with the fake model and engines of `verl_job`.

python -m tests.extensions.trainers.verl_on_ray SERVER RUN FOLDER MODEL
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from omegaconf import open_dict
from verl.experimental.fully_async_policy import fully_async_main as verl_main
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
from verl.trainer.main_ppo import run_ppo

from rolloutmq.extensions.trainers import verl
from tests.extensions.trainers import verl_job

ITS_RUNNER: Any = verl_main.FullyAsyncTaskRunner.__ray_actor_class__


class TrainerActor(verl_job.Trainer):
    """Is set up as verl's `init_workers` and `set_rollouter` do, and writes its process id."""

    def init_workers(self) -> None:
        self.use_critic = False
        self.actor_rollout_wg = verl_job.Model(None)
        self.engine = verl_job.Engine(None)
        self.checkpoint_manager = self
        self.kill = None
        write_pid(self.config, "trainer")

    def _fit_update_actor(self, batch: Any) -> Any:
        time.sleep(0.2)  # so that a test can kill an actor before the job ends
        return super()._fit_update_actor(batch)

    def set_rollouter(self, rollouter: Any) -> None:
        self.rollouter = rollouter


class RollouterActor(FullyAsyncRollouter.__ray_actor_class__):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        # Ray copies the class with the names of its module
        names = super().__init__.__globals__
        names["create_rl_dataset"] = lambda *_, **__: verl_job.Prompts()
        super().__init__(*args, **options)

    async def init_workers(self) -> None:
        self._init_async_objects()
        self.async_rollout_manager = self.llm_server_manager = verl_job.Engine(None)
        write_pid(self.config, "rollouter")


class Runner(ITS_RUNNER):  # type: ignore[misc]
    """verl's task runner, which makes actors of these classes, and no models."""

    def __init__(self) -> None:
        super().__init__()
        names = ITS_RUNNER._initialize_components.__globals__
        names["create_role_worker_mapping"] = lambda _: ({}, None)

    def _create_trainer(self, config: Any) -> None:
        trainer = ray.remote(num_cpus=1)(TrainerActor).remote(config, None, {}, None)
        ray.get(trainer.init_workers.remote())
        self.components["trainer"] = trainer

    def _create_rollouter(self, config: Any) -> None:
        made = ray.remote(num_cpus=1, max_concurrency=9)(RollouterActor)
        rollouter = made.remote(config=config, tokenizer=None, processor=None)
        ray.get(rollouter.init_workers.remote())
        ray.get(rollouter.set_max_required_samples.remote())
        self.components["rollouter"] = rollouter


def write_pid(config: Any, name: str) -> None:
    file = Path(config.trainer.default_local_dir) / f"{name}.pid"
    file.write_text(str(os.getpid()), encoding="utf-8")


def main(server: str, run: str, folder: str, model: str) -> None:
    config = verl_job.job_config(server, run, Path(folder), samples=40)
    with open_dict(config):
        config.actor_rollout_ref.model.path = model
        config.trainer.val_before_train = False
    ray.init(num_cpus=16, include_dashboard=False)
    verl_main.FullyAsyncTaskRunner = ray.remote(num_cpus=1)(Runner)
    # without the command line of hydra
    verl_main.main = lambda: run_ppo(config, task_runner_class=verl_main.FullyAsyncTaskRunner)
    verl.main()


if __name__ == "__main__":
    from tests.extensions.trainers import verl_on_ray

    verl_on_ray.main(*sys.argv[1:])
