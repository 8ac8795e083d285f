"""SkyRL's own trainer on a run; only its dispatch to Ray's GPU workers is replaced.

    python -m tests.extensions.trainers.skyrl_process URL RUN FOLDER STEPS

"Weights" are the rows that were trained, so a checkpoint shows which.
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

# skyrl 0.3.0 defines pydantic models with it, which pydantic refuses before Python 3.12
typing.TypedDict = typing_extensions.TypedDict

from skyrl.train import trainer as skyrl_trainer  # noqa: E402
from skyrl.train.config import (  # noqa: E402
    AlgorithmConfig,
    GeneratorConfig,
    SkyRLTrainConfig,
    TrainerConfig,
)

from buffer.redis.store import Store  # noqa: E402
from buffer.run.run import Run  # noqa: E402
from buffer.weights.checksums import write_tensors  # noqa: E402
from buffer.weights.shared_folder import FolderSender  # noqa: E402
from rolloutmq.extensions.trainers.skyrl import RunGenerator  # noqa: E402

GROUPS, MEMBERS = 3, 4


class Prompts:
    """A data set whose prompts the generator leaves alone."""

    def __len__(self) -> int:
        return GROUPS * 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {"prompt": [{"role": "user", "content": "?"}], "env_class": "none"}
        return row | {"env_extras": {}, "uid": str(index)}

    def collate_fn(self, rows: list[Any]) -> list[Any]:
        return rows


class Dispatch:
    """Stands for the workers that hold the model and its optimizer."""

    def __init__(self) -> None:
        self.trained: list[Any] = []

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        return [data.slice(start, end) for start, end in boundaries]

    def forward_backward_from_staged(self, model: str, chunk: Any) -> Any:
        names = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs")
        for row in zip(*(chunk[name] for name in names), chunk["advantages"], strict=True):
            ids, given, response, loss, logprobs, advantage = row
            there = response.bool()
            self.trained.append(
                {
                    "tokens": ids[given.bool()].tolist(),
                    "response": int(there.sum()),
                    "mask": loss[there].tolist(),
                    "logprobs": logprobs[there].tolist(),
                    "is_better": float(advantage[there][0]) > 0,
                }
            )
        return SimpleNamespace(metrics={"policy_loss": 0.0})

    def optim_step(self, model: str) -> float:
        return 1.0

    def save_checkpoint(self, model: str, folder: str, tokenizer: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "trained.json").write_text(json.dumps(self.trained))

    def load_checkpoint(self, model: str, folder: str, **options: Any) -> None:
        self.trained = json.loads((Path(folder) / "trained.json").read_text())

    def save_hf_model(self, model: str, folder: str, tokenizer: Any) -> None:
        write_tensors(Path(folder) / "model.safetensors", {}, {})

    async def save_weights_for_sampler(self) -> None: ...
    def init_weight_sync_state(self, client: Any) -> None: ...
    def empty_cache(self, model: str = "") -> None: ...
    def get_lcm_dp_size(self) -> int:
        return 1

    def get_node_ids(self) -> list[str]:
        return []


def configuration(folder: Path, steps: int) -> Any:
    trainer = TrainerConfig(
        train_batch_size=GROUPS,
        policy_mini_batch_size=GROUPS,
        max_training_steps=steps,
        ckpt_path=str(folder / "checkpoints"),
        export_path=str(folder / "exports"),
        ckpt_interval=2,
        max_ckpts_to_keep=-1,
        hf_save_interval=-1,
        eval_interval=-1,
        print_example_interval=0,
        resume_mode="latest",
        algorithm=AlgorithmConfig(policy_loss_type="rollout_is", use_kl_loss=False),
    )
    generator = GeneratorConfig(n_samples_per_prompt=MEMBERS)
    cfg = SkyRLTrainConfig(trainer=trainer, generator=generator)
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.trainer.enable_ray_gpu_monitor = False
    cfg.trainer.placement.colocate_all = False
    cfg.data.dataloader.num_workers = 0
    cfg.data.dataloader.persistent_workers = False
    return cfg


def main(url: str, name: str, folder: Path, steps: int) -> None:
    run = Run.open(Store(url), name)
    rollouts = RunGenerator(run, FolderSender(folder / "weights"), pause="keep")
    quiet = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    skyrl_trainer.run_on_each_node = lambda *_: None  # would start a cluster of Ray
    trainer = skyrl_trainer.RayPPOTrainer(
        configuration(folder, steps),
        tracker=quiet,
        tokenizer=SimpleNamespace(pad_token_id=0),
        train_dataset=Prompts(),
        inference_engine_client=None,
        generator=rollouts,
        callbacks=[rollouts],
    )
    trainer.dispatch = Dispatch()
    asyncio.run(trainer.train())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
