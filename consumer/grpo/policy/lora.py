"""A LoRA adapter inside a model: its parameters are trained, the model's own weights are frozen.

With the adapter disabled, the model is the KL reference, bit for bit. The saved files are PEFT's,
which vLLM reads too, with the checksum of their model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from buffer.errors import ModelError
from buffer.imports import import_extra
from buffer.weights.safetensors_files import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    BASE_CHECKSUM,
    PEFT_PREFIX,
)
from consumer.config.learner import LoraConfig
from consumer.grpo.model_state.weights_folder import WeightsSnapshot

BASE = "adapter/base"
ALPHA = "adapter/alpha"  # beside the adapter's own tensors in a learner's state


class Adapter:
    """Adds a LoRA adapter to `model`, whose checksum is `base`. It starts as zero: B is zero.

    Raises ConfigError without peft, ModelError for target modules that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, base: str) -> None:
        self._model = model
        self._base = base
        self._peft = import_extra("peft", "[learner.lora]")
        self._identity = {
            BASE: torch.frombuffer(bytearray.fromhex(base), dtype=torch.uint8),
            ALPHA: torch.tensor(config.alpha, dtype=torch.float64),
        }
        _check_targets(model, config.target_modules)
        self._config = self._peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=list(config.target_modules),
            task_type="CAUSAL_LM",
            # no dropout: the ratio of two policies would measure it
        )
        self._peft.inject_adapter_in_model(self._config, model)
        for parameter in self.parameters().values():
            # peft creates them in the type of the model's weights
            parameter.data = parameter.data.float()

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self._model.named_parameters() if ".lora_" in name}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter for forward passes without a gradient: the model of the folder."""
        was_training = self._model.training
        self._model.eval()
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)
            self._model.train(was_training)

    def snapshot(
        self, *, dtype: torch.dtype | None = None, is_writer: bool = True
    ) -> WeightsSnapshot:
        """Copy the adapter to host memory; only its rank that writes has files.

        `dtype`: round the weights to it; default: float32.
        """
        tensors = {
            PEFT_PREFIX + name: value.detach().to("cpu", dtype, copy=True).contiguous()
            for name, value in self._peft.get_peft_model_state_dict(self._model).items()
        }
        config = self._config.to_dict() | {"inference_mode": True}
        # sorted: some values are sets of names
        data = orjson.dumps(config, default=sorted, option=orjson.OPT_INDENT_2)

        def write_config(folder: Path) -> None:
            if is_writer:
                (folder / ADAPTER_CONFIG).write_bytes(data)

        metadata = {"format": "pt", BASE_CHECKSUM: self._base}
        return WeightsSnapshot(
            ADAPTER_TENSORS if is_writer else "", tensors, metadata, write_config
        )

    def state_tensors(self) -> dict[str, Tensor]:
        return dict(self._identity)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ModelError unless `state` is of an adapter for this model, with this alpha."""
        for name, own in self._identity.items():
            if name not in state or torch.equal(state[name], own):
                continue
            other = "another model" if name == BASE else f"alpha = {float(state[name]):g}"
            raise ModelError(
                f"the checkpoint's adapter was trained with {other}",
                hint="resume with the model and the [learner.lora] of the checkpoint",
            )

    def _enable(self, enabled: bool) -> None:
        layer: Any = self._peft.tuners.tuners_utils.BaseTunerLayer
        for module in self._model.modules():
            if isinstance(module, layer):
                module.enable_adapters(enabled)


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    # the output head gets no adapter
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    missing = sorted(set(targets) - linear)
    if missing:
        raise ModelError(
            f"the model has no linear layers named {', '.join(missing)} for an adapter",
            hint=f"[learner.lora] target_modules may be {', '.join(sorted(linear))}",
        )
