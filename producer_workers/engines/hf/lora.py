"""LoRA adapters inside of a transformers model, by PEFT: one at a time, a newer one takes its
place.

Invariant: until the newer one is whole and inside, the model computes with the older one, or with
none.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from producer_workers.engines.base import WeightsError
from producer_workers.engines.model_folder import AdapterCheck


class TransformersAdapter(AdapterCheck):
    """Of one engine."""

    _inside: Any = None  # PEFT's handle on the model that has adapters
    _names = count()  # PEFT calls an adapter by a name, and forgets none by itself

    def put_into(self, model: Any, folder: Path) -> None:
        """The adapter of `folder`, which `check` has passed, in place of the one that `model` has.
        While nothing runs.

        Raises WeightsError, and nothing changed.
        """
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
        except Exception:
            self._take_out(name, is_first=not older)
            raise
        for other in older:
            self._inside.delete_adapter(other)

    def _make_room(self, peft: Any, model: Any, config: Any, name: str) -> list[str]:
        """Put an adapter that changes nothing (B is zero) into the model; the names of those that
        were there.
        """
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
        if different := sorted(
            wanted ^ tensors.keys()
        ):  # PEFT would pass by what is too much or missing
            raise WeightsError(
                f"{folder} has other tensors than its config says: {len(different)} differ, first {different[0]}",
                hint="the old weights still run",
            )
        peft.set_peft_model_state_dict(self._inside, tensors, adapter_name=name)


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise WeightsError("an adapter needs peft", hint="pip install 'rolloutmq[lora]'") from error
    return peft
