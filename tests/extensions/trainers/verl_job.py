"""A job of verl's fully-async trainer without a GPU: its loops, data, checkpoints and batches are
verl's own; model and engine are fakes, and calls between its two actors stay in one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.fully_async_policy import fully_async_rollouter as rollouter_module
from verl.experimental.fully_async_policy.detach_utils import RolloutSample
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer

from rolloutmq.extensions.trainers.verl import MessageQueueClient
from rolloutmq.extensions.trainers.verl_steps import MessageQueue

WIDTH, LONGEST, PAD = 5, 7, 151
"""Padded lengths of prompts and answers, and the id of padding."""
CONFIGS = Path(verl.__file__).parent / "experimental/fully_async_policy/config"


def job_config(
    url: str, run: str, folder: Path, *, samples: int = 24, batch: int = 2, resume: str = "auto"
) -> Any:
    """Return verl's own config, for steps of `batch` samples and a checkpoint every second step."""
    changes = [
        f"+rolloutmq.server={url}",
        f"+rolloutmq.run={run}",
        f"trainer.default_local_dir={folder}",
        f"trainer.resume_mode={resume}",
        "trainer.logger=[]",
        "trainer.balance_batch=False",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "trainer.total_epochs=1",
        "actor_rollout_ref.hybrid_engine=False",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        "actor_rollout_ref.rollout.n=2",
        "async_training.trigger_parameter_sync_step=2",
        "async_training.staleness_threshold=1",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "data.dataloader_num_workers=0",
        f"rollout.total_rollout_steps={samples}",
    ]
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("fully_async_ppo_trainer", overrides=changes)


def generated(number: int, version: int = 0, count: int = 2) -> DataProto:
    """Return what verl's agent loops return for a prompt: padded, with its usual extra fields."""
    random = np.random.default_rng(number)
    prompts = torch.full((count, WIDTH), PAD)
    answers = torch.full((count, LONGEST), PAD)
    attention = torch.zeros((count, WIDTH + LONGEST), dtype=torch.long)
    trained = torch.zeros((count, LONGEST), dtype=torch.long)
    logprobs, scores = torch.zeros((2, count, LONGEST))
    prompt = random.integers(0, 100, random.integers(1, WIDTH + 1))
    for n in range(count):
        answer = random.integers(0, 100, random.integers(1, LONGEST + 1))
        start, end = WIDTH - len(prompt), len(answer)
        prompts[n, start:] = torch.from_numpy(prompt)
        answers[n, :end] = torch.from_numpy(answer)
        attention[n, start : WIDTH + end] = 1
        trained[n, :end] = torch.from_numpy(random.integers(0, 2, end))
        logprobs[n, :end] = -torch.from_numpy(random.random(end)).float()
        scores[n, end - 1] = random.random()
    batch = {
        "prompts": prompts,
        "responses": answers,
        "response_mask": trained,
        "input_ids": torch.cat([prompts, answers], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
    }
    objects = np.empty(count, object)
    objects[:] = [{"pixels": torch.rand(2, 3), "rows": [1, (2, "a")]}, None, *[None] * count][
        :count
    ]
    return DataProto(
        TensorDict(batch, batch_size=count),
        {
            "uid": np.array([f"uid_{number}"] * count, dtype=object),
            "serial": np.array([secrets.token_hex(4)] * count, object),
            "__num_turns__": np.array([2] * count, np.int32),
            "multi_modal_inputs": objects,
            "min_global_steps": np.array([version] * count, object),
            "max_global_steps": np.array([version + 1] * count, object),
        },
        {"metrics": [{"generate_sequences": 0.5, "tool_calls": 0.0}] * count, "keys": ["acc"]},
    )


def sample(number: int, version: int = 0) -> RolloutSample:
    return RolloutSample(generated(number, version), f"sample_0_{number}", 0, {"count/x": number})


def die_at(place: str, number: int, where: tuple[str, int] | None) -> None:
    """Kill this process where a test said so."""
    if where == (place, number):
        os.kill(os.getpid(), signal.SIGKILL)


class Handle:
    """Calls methods of an object as Ray does: in its event loop, with a future as the answer."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            answer = getattr(self._target, name)(*args)
            return await answer if isinstance(answer, Coroutine) else answer

        return _Method(lambda *args: asyncio.run_coroutine_threadsafe(call(*args), self._loop))


class _Method:
    def __init__(self, start: Any) -> None:
        self._start = start

    def remote(self, *args: Any) -> Any:
        return _Answer(self._start(*args))


class _Answer:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._future).__await__()


def ray_get(answers: Any) -> Any:
    if isinstance(answers, list):
        return [ray_get(answer) for answer in answers]
    return answers.future().result()


class Model:
    """A model whose weights are the serials of the samples that it was trained on, in order."""

    def __init__(self, kill: tuple[str, int] | None) -> None:
        self.weights: list[str] = []
        self._kill = kill

    def update(self, batch: DataProto) -> None:
        self.weights += batch.non_tensor_batch["serial"][::2].tolist()
        die_at("update", len(self.weights), self._kill)

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "weights.json").write_text(json.dumps(self.weights), encoding="utf-8")
        die_at("save", len(self.weights), self._kill)

    def load_checkpoint(self, path: str, **_: Any) -> None:
        self.weights = json.loads((Path(path) / "weights.json").read_text(encoding="utf-8"))


class Trainer(FullyAsyncTrainer.__ray_actor_class__):  # type: ignore[misc]
    """verl's trainer with a fake model."""

    def _nothing(self, batch: Any) -> Any:
        return batch

    _fit_compute_reward = _fit_compute_log_prob = _fit_compute_ref_log_prob = _nothing
    _fit_compute_critic = _fit_compute_advantage = _fit_update_critic = _nothing
    _fit_collect_metrics = _fit_dump_data = _nothing

    def _fit_update_actor(self, batch: Any) -> Any:
        self.actor_rollout_wg.update(batch)
        return batch

    def _fit_save_checkpoint(self, force: bool = False) -> None:
        super()._fit_save_checkpoint(force)
        die_at("saved", len(self.actor_rollout_wg.weights), self.kill)

    async def _get_samples_from_queue(self) -> Any:
        found = await super()._get_samples_from_queue()
        die_at("take", len(self.actor_rollout_wg.weights), self.kill)
        return found

    async def update_weights(self, global_steps: int) -> None:
        self.engine.version = global_steps


class Engine:
    """verl's engines and agent loops: returns an answer at once; the version is the trainer's."""

    def __init__(self, kill: tuple[str, int] | None) -> None:
        self.version = 0
        self._started = 0
        self._kill = kill

    async def generate_sequences_single(self, prompts: DataProto) -> DataProto:
        number = int(prompts.non_tensor_batch["number"][0])
        await asyncio.sleep(0.001 * (number % 3))
        self._started += 1
        die_at("generate", self._started, self._kill)
        return generated(number, self.version)

    def get_active_server_count(self) -> int:
        return 2


class Client(MessageQueueClient):
    """The client, which a test may kill after a sample was stored."""

    kill: tuple[str, int] | None = None
    stored = 0

    async def put_sample(self, sample: Any) -> bool:
        kept = await super().put_sample(sample)
        self.stored += 1
        die_at("put", self.stored, self.kill)
        return kept


class Prompts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"dummy_tensor": torch.zeros(1), "number": number}


def run_job(config: Any, kill: tuple[str, int] | None) -> None:
    ray.get = ray_get
    rollouter_module.create_rl_dataset = lambda *_, **__: Prompts()
    queue = MessageQueue.remote(config, 8)
    engine = Engine(kill)
    loop = asyncio.new_event_loop()
    rollouter = FullyAsyncRollouter.__ray_actor_class__(config, None)
    rollouter._init_async_objects()
    rollouter.async_rollout_manager = rollouter.llm_server_manager = engine
    threading.Thread(target=loop.run_forever, daemon=True).start()
    handle = Handle(rollouter, loop)
    trainer = Trainer(config, None, {}, None)
    trainer.use_critic = False
    trainer.actor_rollout_wg = Model(kill)
    trainer.rollouter = handle
    trainer.checkpoint_manager = trainer
    trainer.engine = engine
    trainer.kill = kill
    ray_get(handle.set_max_required_samples.remote())
    trainer.set_total_train_steps(ray_get(handle.get_total_train_steps.remote()))
    client = Client(queue)
    client.kill = kill
    ray_get(handle.set_message_queue_client.remote(client))
    trainer.set_message_queue_client(client)

    async def train() -> None:
        await trainer.load_checkpoint()
        ray_get(handle.load_checkpoint.remote())
        await trainer._fit_update_weights()
        generating = handle.fit.remote()
        await trainer.fit()
        await generating
        await client.clear_queue()

    asyncio.run(train())
