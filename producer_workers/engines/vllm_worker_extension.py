"""The part of the vLLM engine that runs inside vLLM's worker processes.

vLLM mixes `WeightLoader` into its worker class (`worker_extension_cls`); its methods are then called with
`collective_rpc`. Importing this module in a child also ties the child's life to the rollout worker's.

Invariant: one call is one whole weight update. vLLM runs no forward pass during a call, so no token is ever
made by a mixture of old and new weights.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import Any

OWNER_VARIABLE = "ROLLOUTMQ_ENGINE_OWNER"  # also in environment.py, which this process has no need to import
OWNER_LOST = 1


class WeightLoader:
    """Methods that vLLM's worker gains. Names carry the project's: vLLM refuses ones that it has itself."""

    model_runner: Any
    reload_weights: Any
    device: Any
    _rolloutmq_receiver: Any = None

    def rolloutmq_ready(self) -> None:
        """Do nothing: that it can be called says that this class is there."""

    def rolloutmq_load_weights(self, path: str) -> None:
        """Load the safetensors in the folder `path` over the running model."""
        self._rolloutmq_reload(weights_path=path)

    def rolloutmq_receive_weights(self, announced: str, limit_s: float) -> None:
        """Begin to receive announced weights, while the model goes on; `announced` as JSON."""
        from buffer.weights_announcement import Announcement
        from producer_workers.engines.weights_receiver import WeightsReceiver

        self._rolloutmq_receiver = WeightsReceiver(Announcement.parse(announced), limit_s=limit_s)

    def rolloutmq_has_received(self) -> str:
        """Whether they are here and right: "yes", "not yet", or what went wrong."""
        try:
            return "yes" if self._rolloutmq_receiver.is_done() else "not yet"
        except Exception as error:  # an answer, since vLLM would log a traceback for an error
            return str(error) or repr(error)

    def rolloutmq_load_received(self) -> None:
        """Load them over the running model."""
        self._rolloutmq_reload(weights_iterator=self._rolloutmq_receiver.tensors())

    def rolloutmq_forget_received(self) -> None:
        """Free their memory."""
        self._rolloutmq_receiver = None

    def _rolloutmq_reload(self, **source: Any) -> None:
        model = self.model_runner.get_model()
        if self.device.type == "cpu":
            _forget_packed_experts(model)
        try:
            self.reload_weights(**source)
        except Exception:
            _abandon_reload(model, self.model_runner.model_config)
            raise
        if self.device.type == "cpu":
            _pack_heads(model)


def _forget_packed_experts(model: Any) -> None:
    """Make vLLM pack mixture-of-experts weights for the CPU again.

    Up to 0.32 it packs them once: after an update such a model went on with its old experts, silently.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_heads(model: Any) -> None:
    """Pack the output layer for the CPU again.

    Up to 0.32 a head that is tied to the embeddings keeps the packed copy of its first weights: the checkpoint
    names no tensor for it, so the reload passes it by, and every later version samples with the first head.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedEmbeddingMethod" and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)


def _abandon_reload(model: Any, model_config: Any) -> None:
    """Close a reload that failed half-way, so that another can begin.

    vLLM buffers tensors layer by layer; what a failed reload left in the buffers would be mixed into the
    next one. Layers that were finished keep the new weights: the caller loads the old ones over them.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        state = layerwise.get_layerwise_info(module)
        if state.can_load():
            state.loaded_weights.clear()
            state.load_numel = 0
    layerwise.finalize_layerwise_reload(model, model_config)


def end_with_owner(owner_pid: int) -> None:
    """End this process when process `owner_pid` ends.

    vLLM's processes survive a SIGKILL of their owner and hold their memory for ever, a GPU's too.
    """
    if owner_pid == os.getpid():
        return
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os._exit(OWNER_LOST)
    threading.Thread(target=_wait_and_exit, args=(owner,), name="owner-watch", daemon=True).start()


def _wait_and_exit(owner: int) -> None:
    select.select([owner], [], [])
    os._exit(OWNER_LOST)  # no clean-up: the main thread may be inside a forward pass


# It warns at every update of modules that have no weights of their own (rotary embeddings). Missing tensors
# are found before, by model_folder.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
if _owner := os.environ.get(OWNER_VARIABLE):
    end_with_owner(int(_owner))
