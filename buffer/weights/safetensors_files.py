"""Safetensors files without torch (https://github.com/huggingface/safetensors#format).

Headers may come from untrusted sources: every defect in one is a ValueError.
"""

from __future__ import annotations

import threading
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from buffer.errors import ModelError

CHECKSUM_BLOCKS = 4
CHECKSUM_BLOCK_BYTES = 4096
"""How much of a tensor goes into a model's checksum: this many blocks, evenly spaced. A smaller
tensor is read as a whole."""

MODEL_LOADING = threading.Lock()
"""One thread of a process loads a model at a time: transformers sets process-wide switches
meanwhile, and another thread may get a model without values ("Cannot copy out of meta tensor")."""

# safetensors -> torch
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
"""The two files of a LoRA adapter, as PEFT writes them and vLLM reads them."""

PEFT_PREFIX = "base_model.model."  # before the name of a layer

BASE_CHECKSUM = "rolloutmq_base"
"""Metadata key of an adapter's tensors: the checksum (`model_checksum`) of its base model."""


class TensorSpan(NamedTuple):
    """A tensor in its file, by byte offsets; `dtype` is the format's name ("F32", "BF16")."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorHeader(NamedTuple):
    """A file's tensors by name. `file_bytes`: the size that the whole file must have."""

    tensors: dict[str, TensorSpan]
    metadata: dict[str, Any]
    file_bytes: int


def read_header(stream: IO[bytes]) -> TensorHeader:
    """Read the header from the beginning of a file. Raises ValueError, OSError."""
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= 100_000_000:  # the limit of the format itself
        raise ValueError(f"impossible header length: {length} bytes")
    header = orjson.loads(stream.read(length))
    data_start = 8 + length
    try:
        metadata = dict(header.pop("__metadata__", {}))
        tensors = {name: _span(entry, data_start) for name, entry in header.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the header does not describe tensors: {error!r}") from error
    file_bytes = max((span.end for span in tensors.values()), default=data_start)
    return TensorHeader(tensors, metadata, file_bytes)


def weight_files(folder: Path) -> list[Path]:
    """Return a checkpoint's files: the shards that an index names, else all. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(orjson.loads(index.read_bytes())["weight_map"].values())
        except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of weights: {error!r}") from error
        files = [folder / str(name) for name in sorted(names)]
    else:
        files = sorted(folder.glob("[!.]*.safetensors"))
    if not files:
        hint = "save it with safetensors, not as a pickle"
        raise ModelError(f"{folder} has no *.safetensors", hint=hint)
    return files


def model_checksum(folder: Path) -> str:
    """Identify the weights in `folder`, however they are split into files. Raises ModelError.

    BLAKE2b, 16 bytes in hex, of each tensor's name, type, shape and some blocks of its data. It
    tells models apart, but does not prove that a file is complete; the manifest does.
    """
    digests: dict[str, bytes] = {}
    for file in weight_files(folder):
        try:
            with file.open("rb") as stream:
                for name, span in read_header(stream).tensors.items():
                    digests[name] = _digest(stream, span)
        except (OSError, ValueError) as error:
            message = f"{file} is not a valid safetensors file: {error!r}"
            raise ModelError(message, hint="is the copy complete?") from error
    whole = blake2b(digest_size=16)
    for name in sorted(digests):
        whole.update(name.encode() + b"\0" + digests[name])
    return whole.hexdigest()


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def _span(entry: dict[str, list[int]], data_start: int) -> TensorSpan:
    start, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= start <= end:
        raise ValueError(f"a tensor from byte {start} to {end}")
    shape = tuple(int(n) for n in entry["shape"])
    return TensorSpan(str(entry["dtype"]), shape, data_start + start, data_start + end)


def _digest(stream: IO[bytes], span: TensorSpan) -> bytes:
    digest = blake2b(orjson.dumps([span.dtype, span.shape]), digest_size=16)
    size = span.end - span.start
    step = max(size // CHECKSUM_BLOCKS, 1)
    offsets = range(0, CHECKSUM_BLOCKS * step, step)
    if size <= CHECKSUM_BLOCKS * CHECKSUM_BLOCK_BYTES:
        offsets = range(0, size, CHECKSUM_BLOCK_BYTES)
    for offset in offsets:
        stream.seek(span.start + offset)
        digest.update(stream.read(min(CHECKSUM_BLOCK_BYTES, size - offset)))
    return digest.digest()
