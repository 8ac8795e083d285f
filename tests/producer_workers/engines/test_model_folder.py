"""Bad model folders are told apart before an engine starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file

from producer_workers.engines.base import EngineError, WeightsError
from producer_workers.engines.model_folder import (
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
