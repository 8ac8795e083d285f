"""Weights as `save_pretrained` writes them, by any number of ranks, none of which holds all.

They are copied to host memory after a step, and written to files during the next one.

transformers fuses and renames parameters: all ranks gather one layer after the other, and the rank
that writes it copies it under the names of the folder.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from buffer.errors import PublicationFailed, RankLost
from buffer.weights.checksums import FileChecksums, RawTensor, WrittenFiles, write_tensors
from buffer.weights.safetensors_files import DTYPES
from consumer.grpo.model_state.sharding import gather
from consumer.handle.ranks import Ranks, balanced_shares

INDEX = "model.safetensors.index.json"

_NAMES = {getattr(torch, name): code for code, name in DTYPES.items()}


class HostBuffers:
    """Host memory for copies of tensors, pinned for those of a GPU, and reused by each copy.

    Invariant: a copy stays as it is until the next copy of a tensor of that name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy, floats rounded to `dtype`; from a GPU, complete only after `wait`."""
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != kind:
            buffer = torch.empty(tensor.shape, dtype=kind, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class WeightsSnapshot:
    """The files of one version that this rank writes.

    file: the name of its safetensors file; "": it has none. write_others: writes the small files.
    """

    file: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    write_others: Callable[[Path], None]

    def write(self, folder: Path) -> WrittenFiles:
        """Write the files into an existing folder; return the checksums of the tensors' file."""
        self.write_others(folder)
        if not self.file:
            return WrittenFiles()
        raw = {}
        for name, tensor in self.tensors.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            raw[name] = RawTensor(_NAMES[tensor.dtype], tuple(tensor.shape), data.data)
        facts = write_tensors(folder / self.file, raw, self.metadata)
        return WrittenFiles({self.file: facts})


def snapshot_weights(
    model: PreTrainedModel, ranks: Ranks, buffers: HostBuffers, *, dtype: torch.dtype | None = None
) -> WeightsSnapshot:
    """Copy config.json and this rank's share of the weights; all ranks must call it.

    `dtype`: round the weights to it, except those that transformers keeps in float32. Tied weights
    are copied once. `buffers` need host memory for this rank's share of the model.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors = {name: value for name, value in model.state_dict().items() if name not in tied}
    # names of a layer, which are converted together, or a single one
    groups: dict[str, list[str]] = {}
    for name in tensors:
        parts = name.split(".")
        numbers = [position for position, part in enumerate(parts) if part.isdigit()]
        layer = parts[: numbers[0] + 1] if numbers else parts
        groups.setdefault(".".join(layer), []).append(name)
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    sizes = [sum(tensors[name].numel() for name in group) for group in groups.values()]
    own: dict[str, Tensor] = {}
    share = set(balanced_shares(sizes, ranks.size)[ranks.rank])
    for index, group in enumerate(groups.values()):
        whole = {name: gather(tensors[name].detach()) for name in group}
        if index in share:
            converted = revert_weight_conversion(model, whole)
            for name, part in converted.items():
                is_kept = any(module in name for module in kept)
                own[name] = buffers.copy(name, part, None if is_kept else dtype)
    buffers.wait()
    write_others = _writer_of_others(model, own, ranks, dtype)
    return WeightsSnapshot(_file_name(ranks.rank, ranks.size), own, {"format": "pt"}, write_others)


def _file_name(rank: int, size: int) -> str:
    return "model.safetensors" if size == 1 else f"model-{rank + 1:05d}-of-{size:05d}.safetensors"


def _writer_of_others(
    model: PreTrainedModel, own: Mapping[str, Tensor], ranks: Ranks, dtype: torch.dtype | None
) -> Callable[[Path], None]:
    """Return what writes config.json, and the index of several files: on rank 0, else nothing."""
    parts = ranks.gather([list(own), sum(tensor.nbytes for tensor in own.values())])
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    files = {
        name: _file_name(rank, ranks.size)
        for rank, (names, _) in enumerate(parts)
        for name in names
    }
    index = {"metadata": {"total_size": sum(size for _, size in parts)}, "weight_map": files}

    def write(folder: Path) -> None:
        if ranks.rank:
            return
        if ranks.size > 1:
            (folder / INDEX).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)

    return write


POLL_S = 0.02


class WeightParts:
    """The parts of published weights, written by a thread of each rank while all of them train.

    rank 0                                  each other rank
    posts the folder                        finds it, and writes its part into it
    writes its own part                     posts the checksums, or what went wrong
    waits for the others

    Threads use no collective, which would mix with those of training. If a rank dies, the next
    exchange of all ranks (`TrainerRank.meet`) ends them all.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, "weight-parts")
        self._ended = threading.Event()
        self._number = 0
        self._attempt = 0
        self._snapshot: WeightsSnapshot | None = None

    def begin(self, snapshot: WeightsSnapshot) -> None:
        self._ended.set()  # of the last one
        self._ended = threading.Event()
        self._snapshot = snapshot
        self._number += 1
        self._attempt = 0
        if self._ranks.rank:
            self._thread.submit(self._follow, snapshot, self._number, self._ended)

    def write(self, folder: Path) -> WrittenFiles:
        """Write all parts into `folder`; return their checksums. Raises PublicationFailed."""
        assert self._snapshot
        ranks = self._ranks
        self._attempt += 1
        names = [_name(self._number, self._attempt, rank) for rank in range(ranks.size)]
        if ranks.size > 1:
            ranks.post(names[0], str(folder))
        parts = [self._write_own(self._snapshot, folder)]
        for name in names[1:]:
            while not (part := ranks.posted(name)):
                if self._ended.wait(POLL_S):
                    raise RankLost(
                        "the trainer ended before all ranks had written their part of the weights"
                    )
            parts.append(part)
        if problems := [str(part["problem"]) for part in parts if part["problem"]]:
            raise PublicationFailed("; ".join(problems), hint="is the disk full?")
        files = [item for part in parts for item in part["files"].items()]
        return WrittenFiles((name, FileChecksums.parse(facts)) for name, facts in files)

    def close(self) -> None:
        self._ended.set()
        self._thread.shutdown()

    def _follow(self, snapshot: WeightsSnapshot, number: int, ended: threading.Event) -> None:
        attempt = 1
        while not ended.wait(POLL_S):
            folder = self._ranks.posted(_name(number, attempt, 0))
            if folder:
                own = self._write_own(snapshot, Path(folder))
                self._ranks.post(_name(number, attempt, self._ranks.rank), own)
                attempt += 1

    def _write_own(self, snapshot: WeightsSnapshot, folder: Path) -> dict[str, Any]:
        problem = ""
        facts = WrittenFiles()
        try:
            facts = snapshot.write(folder)
        except Exception as error:  # rank 0, which waits for this part, raises it
            problem = f"rank {self._ranks.rank} cannot write its part of the weights: {error!r}"
        return {"problem": problem, "files": {n: each.to_json() for n, each in facts.items()}}


def _name(number: int, attempt: int, rank: int) -> str:
    return f"weights/{number}/{attempt}/{rank}"
