"""Load weights inside vLLM's worker processes, and end these with the rollout worker.

Invariant: one call is one whole weight update. vLLM runs no forward pass during a call, so no token
comes from a mixture of old and new weights; and a call succeeds only if it did in every shard.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Any

from producer_workers.engines.vllm import OWNER_VARIABLE

OWNER_LOST = 1
PROBLEM_BYTES = 1024  # of an error that a shard reports to the others

logger = logging.getLogger(__name__)


class WeightLoader:
    """Methods that vLLM mixes into its worker and calls in every shard by `collective_rpc`."""

    model_runner: Any
    parallel_config: Any
    reload_weights: Any
    add_lora: Any
    device: Any
    rank: int

    def rolloutmq_ready(self) -> None:
        """Answer, as a sign of life; at first, complete what vLLM's start left out."""
        if self.device.type == "cpu" and self.parallel_config.pipeline_parallel_size > 1:
            _make_stage_buffers(self.model_runner)

    def rolloutmq_load_weights(self, path: str) -> None:
        """Load this shard's part of the safetensors in `path` into the running model."""
        _do_in_every_shard(self, lambda: self._rolloutmq_reload(weights_path=path))

    def rolloutmq_load_adapter(self, name: str, number: int, path: str) -> None:
        """Replace adapter `number` with this shard's part of the one in `path`."""

        def replace() -> None:
            from vllm.lora.request import LoRARequest

            if not self.add_lora(LoRARequest(name, number, path, load_inplace=True)):
                raise RuntimeError(f"vLLM loaded no adapter from {path}")

        _do_in_every_shard(self, replace)

    def _rolloutmq_reload(self, **source: Any) -> None:
        model = self.model_runner.get_model()
        if self.device.type == "cpu":
            _forget_packed_experts(model)
        try:
            self.reload_weights(**source)
        except Exception:  # for any error, vLLM's next reload must begin anew
            _abandon_reload(model, self.model_runner.model_config)
            raise
        if self.device.type == "cpu":
            _pack_heads(model)


def _do_in_every_shard(worker: WeightLoader, act: Callable[[], object]) -> None:
    """Call `act` and exchange the result with the other shards; the last shard raises all errors.

    vLLM reads its processes' answers in order, up to the first error, and would take the remaining
    ones for answers to the next call. So only the last process may raise.
    """
    problem = ""
    try:
        act()
    except Exception as error:
        logger.warning("shard %d of the engine: %r", worker.rank, error)
        problem = repr(error)
    found = [f"shard {shard}: {text}" for shard, text in enumerate(_exchange(problem)) if text]
    if found and worker.rank == worker.parallel_config.world_size - 1:
        raise RuntimeError("; ".join(found))


def _exchange(problem: str) -> list[str]:
    """Wait for all shards; return the error of each, this one's `problem` included."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [problem]
    padded = bytearray(problem.encode()[:PROBLEM_BYTES].ljust(PROBLEM_BYTES, b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8)
    problems = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(problems, mine, group=group.cpu_group)
    return [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in problems]


def _make_stage_buffers(runner: Any) -> None:
    """Give a later pipeline stage the buffers for what the stage before sends.

    vLLM makes them only in its warm-up, which a CPU engine without compilation skips:
    its first forward pass would end the engine.
    """
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", 0) is None:
        runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _forget_packed_experts(model: Any) -> None:
    """Make vLLM pack experts for the CPU again: it packs them only once."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_heads(model: Any) -> None:
    """Pack the output layer for the CPU again.

    A head tied to the embeddings keeps its first weights: no checkpoint has it.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedEmbeddingMethod" and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)


def _abandon_reload(model: Any, model_config: Any) -> None:
    """Close a failed reload: its tensors in vLLM's buffers would be mixed into the next one.

    Layers that were finished keep the new weights; the caller loads the old ones over them.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        state = layerwise.get_layerwise_info(module)
        if state.can_load():
            state.loaded_weights.clear()
            state.load_numel = 0
    layerwise.finalize_layerwise_reload(model, model_config)


def end_with_owner(owner_pid: int) -> None:
    """End with process `owner_pid`: vLLM's processes survive its SIGKILL and keep their memory."""
    if owner_pid == os.getpid():
        return
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os._exit(OWNER_LOST)

    def wait_and_exit() -> None:
        select.select([owner], [], [])
        os._exit(OWNER_LOST)  # no clean-up: the main thread may be inside a forward pass

    threading.Thread(target=wait_and_exit, name="owner-watch", daemon=True).start()


# vLLM warns at every update of modules without weights of their own (rotary embeddings).
# `model_folder` finds missing tensors before.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
if _owner := os.environ.get(OWNER_VARIABLE):
    end_with_owner(int(_owner))
