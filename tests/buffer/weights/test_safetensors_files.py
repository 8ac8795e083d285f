from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save as save_bytes
from safetensors.numpy import save_file

from buffer.errors import ModelError
from buffer.weights.safetensors_files import model_checksum, read_header


def save(folder: Path, *parts: dict[str, NDArray[np.float32]]) -> str:
    """Write parts of a model into a new folder, with an index beside what is no part of it; its
    checksum.
    """
    folder.mkdir()
    for number, part in enumerate(parts):
        save_file(part, folder / f"part-{number}.safetensors")
    (folder / "another.safetensors").write_bytes(b"torn")
    index = {
        name: f"part-{number}.safetensors" for number, part in enumerate(parts) for name in part
    }
    (folder / "model.safetensors.index.json").write_bytes(orjson.dumps({"weight_map": index}))
    return model_checksum(folder)


def test_a_model_is_known_by_its_weights_and_not_by_its_files(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    small = draw.random(30, "f4")
    large = draw.random((40, 1001), "f4")  # of the large one, blocks are read
    once = save(tmp_path / "once", {"small": small, "large": large})
    assert save(tmp_path / "cut", {"large": large}, {"small": small}) == once
    last = small.copy()
    last[-1] += 1
    others = {
        "trained": {"small": small, "large": large * np.float32(1.001)},
        "one number": {"small": last, "large": large},
        "names": {"little": small, "large": large},
        "shape": {"small": small, "large": large.reshape(1001, 40)},
        "type": {"small": small, "large": large.view("i4")},
    }
    checksums = {name: save(tmp_path / name, tensors) for name, tensors in others.items()}
    assert len({once, *checksums.values()}) == 1 + len(others), checksums


def test_what_holds_no_whole_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \*.safetensors"):
        model_checksum(tmp_path)
    save(tmp_path / "torn", {"w": np.ones(9, "f4")})
    (tmp_path / "torn" / "part-0.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"part-0\.safetensors is not a valid safetensors file"):
        model_checksum(tmp_path / "torn")


WHOLE = save_bytes({"w": np.ones((2, 3), "f4"), "b": np.zeros(3, "f4")}, {"made_by": "a test"})


PARTS = [
    WHOLE[:8],
    *WHOLE[8 : -9 * 4].replace(b'"', b"\n").replace(b",", b"\n").split(),
    WHOLE[-4:],
    b"",
]
OTHERS = [
    b"", b"null", b"-1", b"9" * 30, b"[]", b"{}", b'"', b"1.5", b"1e400", b"\xff" * 8, b"\0" * 8,
]  # fmt: skip


@given(
    st.binary(max_size=60)
    | st.builds(WHOLE.replace, st.sampled_from(PARTS), st.sampled_from(OTHERS))
)
def test_bytes_of_strangers_are_whole_files_or_errors(data: bytes) -> None:
    try:
        header = read_header(BytesIO(data))
    except ValueError:
        return
    spans = header.tensors.values()
    assert all(8 < span.start <= span.end <= header.file_bytes for span in spans)
