"""The gates of a mixture of experts, as transformers builds it: which module chooses for which
layer.

Workers record what they choose and a trainer has them choose the same again, so both must count
alike: the layers of `routed_experts` are those of the model from the first one, and one without
experts has zeros, as in vLLM.
"""

from __future__ import annotations

from typing import Any


def expert_gates(model: Any) -> dict[int, Any]:
    """The gates of a transformers model by layer; none of a model without experts.

    A gate's forward pass gives (logits, weights, chosen experts) of every token: each int64[tokens,
    top_k] at the end.
    """
    kinds = tuple({kind for module in model.modules() if (kind := _kind_of_gate(module))})
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))
    return {layer: module for name, module in named if (layer := _layer(name)) is not None}


def layers_of(model: Any) -> int:
    """How many layers a transformers model has, those without experts too."""
    return int(model.config.get_text_config().num_hidden_layers)


def _kind_of_gate(module: Any) -> type | None:
    """What a model of transformers says its `router_logits` come from."""
    recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    return kind if isinstance(kind, type) else None


def _layer(name: str) -> int | None:
    """The number in "model.layers.3.mlp.gate"."""
    _, found, rest = name.rpartition("layers.")
    number = rest.partition(".")[0]
    return int(number) if found and number.isdigit() else None
