from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from buffer.weights.safetensors_files import BASE_CHECKSUM, PEFT_PREFIX, is_adapter, model_checksum
from producer_workers.engines.base import EngineError, WeightsError
from producer_workers.engines.model_folder import (
    AdapterCheck,
    check_model_folder,
    check_same_tensors,
    has_tied_head,
    read_shapes,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((2, 3), "f4"), "b": np.zeros(4, "f4")}, path / "model.safetensors")
    return path


def test_check_model_folder_passes_when_all_is_there(folder: Path) -> None:
    check_model_folder(folder)
    assert read_shapes(folder) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_check_model_folder_names_what_is_missing(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(EngineError, match=r"config\.json|tokenizer|safetensors") as caught:
        check_model_folder(folder)
    assert caught.value.exit_code == 4


def test_check_model_folder_says_so_when_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model folder"):
        check_model_folder(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"", b"\x05", b"\x05" + bytes(7) + b"{a:1}", b"\xff" * 100])
def test_read_shapes_refuses_a_file_that_is_not_safetensors(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="not a valid safetensors file"):
        read_shapes(folder)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_read_shapes_refuses_a_truncated_file(folder: Path, cut: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(WeightsError, match="by its header"):
        read_shapes(folder)


def test_read_shapes_follows_the_index_when_there_are_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({"c": np.zeros(1, "f4")}, folder / "model-2.safetensors")
    save_file({"stale": np.zeros(1, "f4")}, folder / "old.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_bytes(orjson.dumps(index))
    assert set(read_shapes(folder)) == {"a", "b", "c"}
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-2"):
        read_shapes(folder)


@pytest.mark.parametrize(
    ("new", "reason"),
    [({"a": (2, 3)}, "lacks b"), ({"a": (2, 3), "b": (5,)}, "another shape of b")],
)
def test_check_same_tensors_names_the_difference(
    folder: Path, new: dict[str, tuple[int, ...]], reason: str
) -> None:
    with pytest.raises(WeightsError, match=reason):
        check_same_tensors(read_shapes(folder), new, folder, tied_head=False)


def test_check_same_tensors_asks_for_an_output_head_unless_it_is_tied(
    folder: Path, tmp_path: Path
) -> None:
    old = {"lm_head.weight": (2, 2), "a": (1,)}
    new = {"a": (1,)}
    check_same_tensors(old, new, tmp_path, tied_head=True)
    check_same_tensors(new, old, tmp_path, tied_head=True)
    with pytest.raises(WeightsError, match="lm_head"):
        check_same_tensors(old, new, tmp_path, tied_head=False)
    assert not has_tied_head(folder)
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert has_tied_head(tmp_path)


# -- adapters ---

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
        (lambda _, __, metadata: metadata.update({BASE_CHECKSUM: "0" * 32}), "its base has checksum 0000"),
        (lambda config, *_: config.update(r=16), "of rank 16"),
        (lambda config, *_: config.pop("r"), "holds no LoRA adapter"),
        (
            lambda config, *_: config.update(alpha_pattern={"q_proj": 9}),
            "not a plain LoRA adapter: it has alpha_pattern",
        ),
        (lambda _, tensors, __: tensors.update({f"{LAYER}.lora_A.weight": np.ones((2, 5), "f4")}), r"is \[2, 5\]"),
        (
            lambda _, tensors, __: tensors.update(
                {f"{PEFT_PREFIX}norm.lora_A.weight": np.ones((2, 4), "f4")}
            ),
            "does not fit",
        ),
    ],
)  # fmt: skip
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
