"""A LoRA adapter inside of a model whose own weights stay as they are: the only thing that is then trained.

With the adapter switched off the model is, bit for bit, the one of its folder: the reference of a KL term costs no
second model. What is saved are PEFT's files (adapter_config.json, adapter_model.safetensors), which vLLM reads, too,
with the checksum of the model that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from buffer.errors import ConfigError, ModelError
from buffer.weights.safetensors_files import ADAPTER_CONFIG, ADAPTER_TENSORS, BASE_CHECKSUM, PEFT_PREFIX
from consumer.learner_config import LoraConfig

IDENTITY, SCALE = "adapter/base", "adapter/alpha"
"""Beside an adapter's own tensors in the state of a learner."""


class Adapter:
    """Puts one into `model`, which `base` is the checksum of. It begins as nothing: B is zero.

    Raises ConfigError without peft, ModelError for target modules that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, base: str) -> None:
        self._model, self._base, self._peft = model, base, _import_peft()
        self._identity = {
            IDENTITY: torch.frombuffer(bytearray.fromhex(base), dtype=torch.uint8),
            SCALE: torch.tensor(config.alpha, dtype=torch.float64),
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
            parameter.data = parameter.data.float()  # as it was made, it has the type of the model's weights

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by its name in the model; float32."""
        return {name: value for name, value in self._model.named_parameters() if ".lora_" in name}

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model of the folder, for forward passes without a gradient."""
        was_training = self._model.training
        self._model.eval()
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)
            self._model.train(was_training)

    def save(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write it into an existing folder; rounded to `dtype` where one is given."""
        tensors = {
            PEFT_PREFIX + name: value.detach().to("cpu", dtype, copy=True).contiguous()
            for name, value in self._peft.get_peft_model_state_dict(self._model).items()
        }
        save_file(tensors, folder / ADAPTER_TENSORS, {"format": "pt", BASE_CHECKSUM: self._base})
        config = self._config.to_dict() | {"inference_mode": True}
        data = orjson.dumps(config, default=sorted, option=orjson.OPT_INDENT_2)  # sets, of names
        (folder / ADAPTER_CONFIG).write_bytes(data)

    def state_tensors(self) -> dict[str, Tensor]:
        """What says which model, and how much of the adapter is added to it."""
        return dict(self._identity)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ModelError unless `state` is of an adapter that was trained for this model, with this alpha."""
        for name, mine in self._identity.items():
            if name in state and not torch.equal(state[name], mine):
                what = "another model" if name == IDENTITY else f"alpha = {float(state[name]):g}"
                hint = "resume with the model and the [learner.lora] that the checkpoint was made with"
                raise ModelError(f"the checkpoint's adapter was trained with {what}", hint=hint)

    def _enable(self, enabled: bool) -> None:
        layer: Any = self._peft.tuners.tuners_utils.BaseTunerLayer
        for module in self._model.modules():
            if isinstance(module, layer):
                module.enable_adapters(enabled)


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("[learner.lora] needs peft", hint="pip install 'rolloutmq[lora]'") from error
    return peft


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if missing := sorted(set(targets) - linear):
        raise ModelError(
            f"the model has no linear layers named {', '.join(missing)} that an adapter could change",
            hint=f"[learner.lora] target_modules may be {', '.join(sorted(linear))}",
        )
