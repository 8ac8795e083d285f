"""Read and write files of rollout lines in bounded memory: JSONL, or Parquet with pyarrow.

In Parquet, token columns are lists of int32 and float32, and nested fields (messages, reward,
some columns, …) JSON text.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from buffer.curation.rollout_line import COLUMN_FIELDS, FIELDS
from buffer.errors import ConfigError, DatasetError
from buffer.imports import install_command
from buffer.redis.whole_file import sync
from buffer.wire.column import Column

LINE_BYTES = 256 * 2**20  # a longer line of JSON is refused before it is parsed

FIX_HINT = "fix the file: each line is one rollout, as `rolloutmq export` writes it"


def _is_list(column: Column) -> bool:
    """Return whether Parquet has the fields of a column as lists of numbers."""
    return column.per == "token" and not column.inner and not column.named


_JSON_COLUMNS = (
    *("messages", "spans", "reward", "sample_params", "ground_truth", "extra", "columns"),
    *(field for field, column in COLUMN_FIELDS.items() if not _is_list(column)),
)
_ROWS = 64  # in memory at a time: a row group of a Parquet file


def kind_of(path: Path) -> str:
    """Return jsonl or parquet, by the suffix. Raises ConfigError, also if pyarrow is missing."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"{path.name} is neither .jsonl nor .parquet", hint="the suffix selects the format"
        )
    if path.suffix == ".parquet":
        _pyarrow()
    return path.suffix[1:]


@contextmanager
def new_file(path: Path) -> Iterator[JsonlWriter | ParquetWriter]:
    """Open a writer for a new file, which appears whole and on disk when the block ends, or never.

    Raises ConfigError when the file exists or cannot be written.
    """
    kind = kind_of(path)
    if path.exists():
        raise ConfigError(f"{path} exists", hint="name a new file")
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        writer = JsonlWriter(hidden) if kind == "jsonl" else ParquetWriter(hidden)
        try:
            yield writer
        finally:
            writer.close()
        sync(hidden)
        hidden.rename(path)
        sync(path.absolute().parent)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        hidden.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, fields) of every line or row. Raises DatasetError."""
    kind = kind_of(path)
    try:
        yield from _read_jsonl(path) if kind == "jsonl" else _read_parquet(path)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


class JsonlWriter:
    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")

    def add(self, line: dict[str, Any]) -> None:
        self._stream.write(
            orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        )

    def close(self) -> None:
        self._stream.close()


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(LINE_BYTES + 1):
            number += 1
            if len(line) > LINE_BYTES:
                raise DatasetError(
                    f"{path}, line {number}: longer than {LINE_BYTES} bytes", hint=FIX_HINT
                )
            if not line.strip():
                continue
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DatasetError(
                    f"{path}, line {number}: not valid JSON: {error}", hint=FIX_HINT
                ) from error


class ParquetWriter:
    def __init__(self, path: Path) -> None:
        self._arrow, parquet = _pyarrow()
        self._schema = _schema(self._arrow)
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        nested = {
            name: orjson.dumps(line[name], option=orjson.OPT_SERIALIZE_NUMPY).decode()
            for name in _JSON_COLUMNS
        }
        self._rows.append({**line, **nested})
        if len(self._rows) == _ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    arrow, parquet = _pyarrow()
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    # null fields get their defaults
                    fields = {name: value for name, value in row.items() if value is not None}
                    for name in _JSON_COLUMNS:
                        if isinstance(fields.get(name), str):
                            fields[name] = orjson.loads(fields[name])
                    yield number, fields
    except orjson.JSONDecodeError as error:
        raise DatasetError(
            f"{path}, row {number}: {name} is not valid JSON: {error}", hint=FIX_HINT
        ) from error
    except arrow.ArrowException as error:
        raise DatasetError(f"{path}, after row {number}: {error}", hint=FIX_HINT) from error


def _schema(arrow: Any) -> Any:
    ids = arrow.list_(arrow.int32())
    texts = arrow.string()
    special = {
        **dict.fromkeys(("index", "samples"), arrow.int32()),
        "staleness": arrow.int64(),
        "prompt_ids": ids,
        "response_ids": ids,
        "logprobs": arrow.list_(arrow.float32()),
        **{
            field: arrow.list_(arrow.from_numpy_dtype(np.dtype(column.dtype)))
            for field, column in COLUMN_FIELDS.items()
            if _is_list(column)
        },
        "response_mask": arrow.list_(arrow.uint8()),
    }
    return arrow.schema([(name, special.get(name, texts)) for name in FIELDS])


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files need the package pyarrow",
            hint=f"{install_command('parquet')}, or use a .jsonl file",
        ) from error
    return pyarrow, pyarrow.parquet
