"""Write the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from buffer.errors import ModelError
from buffer.weights.new_folder import new_folder
from buffer.weights.safetensors_files import model_checksum
from consumer.config.trainer import TrainingConfig
from consumer.grpo.model_state.saved_state import SavedState
from consumer.grpo.models.model_folder import copy_tokenizer, load_model, save_model
from consumer.grpo.policy.lora import Adapter
from consumer.handle.checkpoint import CheckpointFolder

Dtype = Literal["bfloat16", "float32"]


@torch.no_grad()
def export_model(
    config: TrainingConfig, model_dir: Path, step: int, folder: Path, dtype: Dtype = "bfloat16"
) -> None:
    """Write the weights of the checkpoint of `step`, of a run that started from `model_dir`.

    With [learner.lora], writes PEFT's adapter. Needs host memory for the whole model. Raises
    ModelError where there is no such checkpoint, or `folder` exists.
    """
    checkpoints = CheckpointFolder(config.run.folder / "checkpoints")
    steps = checkpoints.steps()
    if step not in steps:
        raise ModelError(
            f"{checkpoints.folder} has no checkpoint of step {step}",
            hint=f"it has those of the steps {', '.join(map(str, steps)) or '(none)'}",
        )
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = load_model(model_dir, dtype=kind)
    lora = config.learner.lora
    adapter = Adapter(model, lora, model_checksum(model_dir)) if lora else None
    parameters = adapter.parameters() if adapter else dict(model.named_parameters())
    with SavedState(checkpoints.path(step)) as state:
        for name, parameter in parameters.items():
            if f"model/{name}" not in state:
                raise ModelError(
                    f"the checkpoint has no {name}", hint="use the config of the run that wrote it"
                )
            parameter.copy_(state[f"model/{name}"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as unfinished:
        if adapter:
            adapter.snapshot(dtype=kind).write(unfinished)
        else:
            save_model(model, unfinished)
        copy_tokenizer(model_dir, unfinished)
