"""Weights are written while they are copied: each tensor once it is there, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from buffer.weights import tensor_file
from buffer.weights.checksums import WrittenFiles
from consumer.models.model_folder import load_model
from consumer.ranks import ALONE
from consumer.weights.weights_folder import take_snapshot
from consumer.weights.weights_snapshot import HostBuffers, NextSnapshot


@pytest.fixture
def model(model_dir: Path) -> PreTrainedModel:
    return load_model(model_dir, dtype=torch.bfloat16)


def before_last(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Call something before the last tensor is copied."""
    copy = HostBuffers.copy
    count = [0]

    def copying(self: HostBuffers, *args: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] == len(self._buffers):
            call()
        return copy(self, *args)

    monkeypatch.setattr(HostBuffers, "copy", copying)


def test_a_version_is_written_while_it_is_copied_and_fails_with_the_copy(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = HostBuffers()
    take_snapshot(model, ALONE, buffers).write(tmp_path)
    first = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1)
    written = threading.Event()
    write_at = tensor_file.write_at

    def watch(descriptor: int, start: int, data: memoryview) -> None:
        write_at(descriptor, start, data)
        if start:  # a tensor: the header is written before any is copied
            written.set()

    def wait() -> None:
        assert written.wait(60)

    def fail() -> None:
        raise MemoryError("no memory for the last tensor")

    monkeypatch.setattr(tensor_file, "write_at", watch)

    def write_beside(name: str, call: Callable[[], None]) -> Future[WrittenFiles]:
        (folder := tmp_path / name).mkdir()
        following = NextSnapshot()
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            before_last(patch, call)
            writing = pool.submit(lambda: following.result().write(folder))
            with following.copying():
                take_snapshot(model, ALONE, buffers, writer=following)
        return writing

    facts = write_beside("whole", wait).result()["model.safetensors"]
    second = load_file(tmp_path / "whole" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(second[key], value + 1) for key, value in first.items())
    assert facts.bytes == (tmp_path / "whole" / "model.safetensors").stat().st_size
    with pytest.raises(MemoryError):
        write_beside("torn", fail)  # it returns only once the writer has ended
