"""The part of the vLLM engine that runs inside vLLM's worker processes.

vLLM mixes `WeightLoader` into its worker class (`worker_extension_cls`); its methods are then
called with `collective_rpc`, in every shard: each tensor and pipeline rank of each data-parallel
replica. Importing this module in a child also ties the child's life to the rollout worker's.

Invariant: one call is one whole weight update. vLLM runs no forward pass during a call, so no token
is ever made by a mixture of old and new weights; and the call succeeds only where it did in every
shard.

Receiving weights in all processes of a vLLM engine, before any of them loads them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from buffer.weights.announcement import Announcement
from producer_workers.engines.base import WeightsError

OWNER_VARIABLE = (
    "ROLLOUTMQ_ENGINE_OWNER"  # also in environment.py, which this process has no need to import
)
OWNER_LOST = 1
PROBLEM_BYTES = 1024
"""What a shard can tell the others of what went wrong with it."""

logger = logging.getLogger(__name__)


class WeightLoader:
    """Methods that vLLM's worker gains. Names carry the project's: vLLM refuses ones that it has
    itself.
    """

    model_runner: Any
    parallel_config: Any
    reload_weights: Any
    add_lora: Any
    device: Any
    rank: int
    _rolloutmq_receiver: Any = None

    def rolloutmq_ready(self) -> None:
        """Say that this class is there and its process alive; at first, make up for what vLLM's
        start left out.
        """
        if self.device.type == "cpu" and self.parallel_config.pipeline_parallel_size > 1:
            _make_stage_buffers(self.model_runner)

    def rolloutmq_load_weights(self, path: str) -> None:
        """Load this shard's part of the safetensors in the folder `path` over the running model."""
        _do_in_every_shard(self, lambda: self._rolloutmq_reload(weights_path=path))

    def rolloutmq_load_adapter(self, name: str, number: int, path: str) -> None:
        """Load this shard's part of the LoRA adapter in the folder `path`, in place of the one with
        this number.
        """
        _do_in_every_shard(self, lambda: _take_adapter(self, name, number, path))

    def rolloutmq_receive_weights(self, announced: str, limit_s: float) -> None:
        """Begin to receive announced weights, while the model goes on; `announced` as JSON."""
        from buffer.weights.announcement import Announcement
        from buffer.weights.tensor_exchange import TensorReceiver

        self._rolloutmq_receiver = TensorReceiver(Announcement.parse(announced), limit_s=limit_s)

    def rolloutmq_has_received(self) -> str:
        """Whether they are here and right: "yes", "not yet", or what went wrong."""
        try:
            return "yes" if self._rolloutmq_receiver.is_done() else "not yet"
        except Exception as error:  # an answer, since vLLM would log a traceback for an error
            return str(error) or repr(error)

    def rolloutmq_load_received(self) -> None:
        """Load this shard's part of them over the running model."""
        _do_in_every_shard(
            self,
            lambda: self._rolloutmq_reload(weights_iterator=self._rolloutmq_receiver.tensors()),
        )

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


def _do_in_every_shard(worker: WeightLoader, act: Callable[[], object]) -> None:
    """`act`, and hear how it went in the others. What went wrong in any of them is raised by the
    last one, alone.

    For vLLM reads the answers of its processes in their order, up to the first error: what stands
    behind that one would be taken for the answers to the next call, which then returned before all
    had done it.
    """
    problem = ""
    try:
        act()
    except Exception as error:
        logger.warning("shard %d of the engine: %r", worker.rank, error)
        problem = repr(error)
    problems = {shard: told for shard, told in enumerate(_tell_all(problem)) if told}
    if problems and worker.rank == worker.parallel_config.world_size - 1:
        raise RuntimeError("; ".join(f"shard {shard}: {told}" for shard, told in problems.items()))


def _tell_all(problem: str) -> list[str]:
    """What each shard told, this one's `problem` included. Waits for all of them."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [problem]
    mine = torch.frombuffer(
        bytearray(problem.encode()[:PROBLEM_BYTES].ljust(PROBLEM_BYTES, b"\0")), dtype=torch.uint8
    )
    told = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(told, mine, group=group.cpu_group)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in told]


def _take_adapter(worker: WeightLoader, name: str, number: int, path: str) -> None:
    from vllm.lora.request import LoRARequest

    if not worker.add_lora(LoRARequest(name, number, path, load_inplace=True)):
        raise RuntimeError(f"vLLM took no adapter from {path}")


def _make_stage_buffers(runner: Any) -> None:
    """Give a later stage of a pipeline the buffers for what it gets from the stage before.

    Up to 0.32 vLLM makes them in its warm-up alone, which a CPU engine that compiles nothing passes
    over: its first forward pass would end the engine.
    """
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", 0) is None:
        runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _forget_packed_experts(model: Any) -> None:
    """Make vLLM pack mixture-of-experts weights for the CPU again.

    Up to 0.32 it packs them once: after an update such a model went on with its old experts,
    silently.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_heads(model: Any) -> None:
    """Pack the output layer for the CPU again.

    Up to 0.32 a head that is tied to the embeddings keeps the packed copy of its first weights: the
    checkpoint names no tensor for it, so the reload passes it by, and every later version samples
    with the first head.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedEmbeddingMethod" and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)


def _abandon_reload(model: Any, model_config: Any) -> None:
    """Close a reload that failed half-way, so that another can begin.

    vLLM buffers tensors layer by layer; what a failed reload left in the buffers would be mixed
    into the next one. Layers that were finished keep the new weights: the caller loads the old ones
    over them.
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


# It warns at every update of modules that have no weights of their own (rotary embeddings). Missing
# tensors are found before, by model_folder.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
if _owner := os.environ.get(OWNER_VARIABLE):
    end_with_owner(int(_owner))

FIRST_POLL_S = 0.002
LAST_POLL_S = 0.05
"""Waits between polls of the processes; doubled each time. A poll costs vLLM's loop one message."""

Call = Callable[..., Awaitable[list[Any]]]
"""Calls a method of the worker extension by name in all processes; returns their results."""


async def receive_weights(call: Call, announced: Announcement, limit_s: float) -> None:
    """Receive announced weights in every process.

    Raises WeightsError, and discards everything, unless all processes have all of it in `limit_s`.
    """
    await call("rolloutmq_receive_weights", announced.to_json().decode(), limit_s)
    try:
        async with asyncio.timeout(limit_s):
            await _wait_for_all(call, announced.label)
    except TimeoutError as error:
        await call("rolloutmq_forget_received")
        message = f"the weights {announced.label} did not arrive within {limit_s:g} s"
        raise WeightsError(message) from error
    except WeightsError:
        await call("rolloutmq_forget_received")
        raise


async def load_received(call: Call) -> None:
    """Load the received weights in all processes at once, between two forward passes."""
    try:
        await call("rolloutmq_load_received")
    finally:
        await call("rolloutmq_forget_received")


async def _wait_for_all(call: Call, label: str) -> None:
    wait_s = FIRST_POLL_S
    while True:
        answers = await call("rolloutmq_has_received")
        if set(answers) == {"yes"}:
            return
        for process, answer in enumerate(answers):
            if answer not in ("yes", "not yet"):
                problem = f"did not reach process {process} of the engine: {answer}"
                raise WeightsError(f"the weights {label} {problem}")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LAST_POLL_S)
