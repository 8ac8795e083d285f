"""Test what a worker refuses of an adapter before its engine reads it; the old weights stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from buffer.weights.safetensors_files import (
    BASE_CHECKSUM,
    PEFT_PREFIX,
    is_adapter,
    model_checksum,
)
from producer_workers.engines.base import WeightsError
from producer_workers.engines.model_folder import AdapterCheck, check_same_tensors, read_shapes

Change = Callable[[dict[str, Any], dict[str, NDArray[np.float32]], dict[str, str]], object]
LAYER = f"{PEFT_PREFIX}layers.0.q_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (path := tmp_path / "model").mkdir()
    save_file(
        {"layers.0.q_proj.weight": np.ones((6, 4), "f4"), "norm.weight": np.ones(4, "f4")},
        path / "m.safetensors",
    )
    return path


@pytest.fixture
def check(model: Path) -> AdapterCheck:
    return AdapterCheck(model, read_shapes(model), most=8)


def write(folder: Path, base: str, change: Change = lambda *_: None) -> Path:
    """Write an adapter of rank 2 for the model of checksum `base`, after `change`."""
    folder.mkdir()
    config: dict[str, Any] = {"r": 2, "lora_alpha": 4, "alpha_pattern": {}, "use_dora": False}
    tensors = {
        f"{LAYER}.lora_A.weight": np.ones((2, 4), "f4"),
        f"{LAYER}.lora_B.weight": np.ones((6, 2), "f4"),
    }
    metadata = {BASE_CHECKSUM: base}
    change(config, tensors, metadata)
    (folder / "adapter_config.json").write_bytes(orjson.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata)
    return folder


def test_an_adapter_that_fits_passes_and_is_no_whole_model(
    model: Path, check: AdapterCheck, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "mine", model_checksum(model))
    check.check(adapter)
    check.check(write(tmp_path / "of others", "", lambda _, __, metadata: metadata.clear()))
    assert is_adapter(adapter)
    assert not is_adapter(model)
    with pytest.raises(
        WeightsError, match="holds a LoRA adapter, and the engine samples with whole weights"
    ):
        check_same_tensors(read_shapes(model), read_shapes(adapter), adapter, tied_head=False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda _, __, metadata: metadata.update({BASE_CHECKSUM: "0" * 32}),
            "its base has checksum 0000",
        ),
        (lambda config, *_: config.update(r=16), "of rank 16"),
        (lambda config, *_: config.pop("r"), "holds no LoRA adapter"),
        (
            lambda config, *_: config.update(alpha_pattern={"q_proj": 9}),
            "not a plain LoRA adapter: it has alpha_pattern",
        ),
        (
            lambda _, tensors, __: tensors.update(
                {f"{LAYER}.lora_A.weight": np.ones((2, 5), "f4")}
            ),
            r"is \[2, 5\]",
        ),
        (
            lambda _, tensors, __: tensors.update(
                {f"{PEFT_PREFIX}norm.lora_A.weight": np.ones((2, 4), "f4")}
            ),
            "does not fit",
        ),
    ],
)
def test_an_adapter_is_refused_that(
    model: Path, check: AdapterCheck, tmp_path: Path, change: Change, problem: str
) -> None:
    with pytest.raises(WeightsError, match=problem):
        check.check(write(tmp_path / "theirs", model_checksum(model), change))


def test_an_adapter_of_another_file_name_is_refused(
    model: Path, check: AdapterCheck, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "renamed", model_checksum(model))
    (adapter / "adapter_model.safetensors").rename(adapter / "model.safetensors")
    with pytest.raises(WeightsError, match="does not name its base model"):
        check.check(adapter)
