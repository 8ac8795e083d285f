"""Find the modules of a transformers model that choose the experts of each layer.

`routed_experts` has all layers of the model, as in vLLM, and zeros for one without experts.
"""

from __future__ import annotations

from typing import Any


def expert_gates(model: Any) -> dict[int, Any]:
    """Return the gates by layer, whose forward returns (logits, weights, int64[tokens, top_k])."""
    kinds = tuple({kind for module in model.modules() if (kind := _kind_of_gate(module))})
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))
    return {layer: module for name, module in named if (layer := _layer(name)) is not None}


def layers_of(model: Any) -> int:
    """Return the number of layers, including those without experts."""
    return int(model.config.get_text_config().num_hidden_layers)


def _kind_of_gate(module: Any) -> type | None:
    """Return the class of modules that the model declares as source of its `router_logits`."""
    recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    return kind if isinstance(kind, type) else None


def _layer(name: str) -> int | None:
    """Return 3 for "model.layers.3.mlp.gate"; None for a module of no layer."""
    _, found, rest = name.rpartition("layers.")
    number = rest.partition(".")[0]
    return int(number) if found and number.isdigit() else None
