"""Load LoRA adapters with PEFT; the older one is used until the newer one is complete."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from buffer.imports import install_command
from producer_workers.engines.base import WeightsError
from producer_workers.engines.model_folder import AdapterCheck


class TransformersAdapter(AdapterCheck):
    _inside: Any = None  # PEFT's handle on the model that has adapters
    _names = count()  # PEFT knows adapters by name and drops none by itself

    def put_into(self, model: Any, folder: Path) -> None:
        """Replace the model's adapter with the checked one in `folder`. Raises WeightsError."""
        peft = _import_peft()
        try:
            config = peft.PeftConfig.from_pretrained(folder)
            tensors = peft.load_peft_weights(str(folder), device=str(model.device))
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise WeightsError(
                f"PEFT cannot read {folder}: {error}", hint="the old weights still run"
            ) from error
        name = f"adapter-{next(self._names)}"
        older = self._make_room(peft, model, config, name)
        try:
            self._fill(peft, tensors, name, folder)
            self._inside.set_adapter(name)
        except Exception:  # of PEFT: the half-filled adapter must not be used
            self._take_out(name, is_first=not older)
            raise
        for other in older:
            self._inside.delete_adapter(other)

    def _make_room(self, peft: Any, model: Any, config: Any, name: str) -> list[str]:
        """Add an adapter that changes nothing (B is zero); return the older ones' names."""
        if self._inside is None or self._inside.get_base_model() is not model:
            self._inside = peft.PeftModel(model, config, adapter_name=name)
            return []
        older = list(self._inside.peft_config)
        self._inside.add_adapter(name, config)
        return older

    def _take_out(self, name: str, *, is_first: bool) -> None:
        if is_first:
            self._inside.unload()
            self._inside = None
        else:
            self._inside.delete_adapter(name)

    def _fill(self, peft: Any, tensors: dict[str, Any], name: str, folder: Path) -> None:
        wanted = peft.get_peft_model_state_dict(self._inside, adapter_name=name).keys()
        # PEFT would ignore missing and unknown tensors.
        if different := sorted(wanted ^ tensors.keys()):
            raise WeightsError(
                f"{folder} has other tensors than its config describes: "
                f"{len(different)} differ, first {different[0]}",
                hint="the old weights still run",
            )
        peft.set_peft_model_state_dict(self._inside, tensors, adapter_name=name)


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise WeightsError("an adapter needs peft", hint=install_command("lora")) from error
    return peft
