from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from buffer.errors import ConfigError, DatasetError
from producer_workers.config.dataset import (
    DatasetSection,
    JsonlSection,
    ParquetSection,
    PythonSection,
)
from producer_workers.datasets.open import open_dataset, open_here
from producer_workers.datasets.row_values import HINT

HERE = "tests.producer_workers.datasets.test_user_errors"


class Odd(BaseException):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError


ERRORS: dict[str, Callable[[], BaseException]] = {
    "KeyError": lambda: KeyError("lines"), "ValueError": lambda: ValueError("no"),
    "SystemExit": lambda: SystemExit(2), "StopIteration": StopIteration,
    "RecursionError": RecursionError, "Odd": Odd,
}  # fmt: skip


def fail(row: Any, error: str = "KeyError") -> Any:
    if row["question"] == "two":
        raise ERRORS[error]()
    return row


keys, values, exits, stops, recurs, odd = (partial(fail, error=name) for name in ERRORS)
ROWS = [{"question": text} for text in ("one", "two", "three")]


class Numbered:
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, row: int) -> Any:
        return fail(ROWS[row])


class Streamed:
    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[Any]:
        return map(fail, ROWS)


def broken_factory() -> Any:
    return fail(ROWS[1])


def section_of(kind: str, folder: Path, record: str) -> tuple[DatasetSection, str]:
    """Return a data set of ROWS, and the place of its row 1."""
    if kind == "jsonl":
        path = folder / "rows.jsonl"
        path.write_text("\n".join(f'{{"question": "{r["question"]}"}}' for r in ROWS))
        return JsonlSection(kind="jsonl", path=path, record=record), f"{path}:2"
    for n, row in enumerate(ROWS):
        parquet.write_table(pa.table({"question": [row["question"]]}), folder / f"{n}.parquet")
    place = f"{folder / '1.parquet'}, row 0"
    return ParquetSection(kind="parquet", path=folder, record=record), place


def read_all(dataset: Any) -> Any:
    return [dataset.row(row) for row in range(len(dataset))]


def assert_names_frame(error: ConfigError, function: Any) -> None:
    lines, start = inspect.getsourcelines(function)
    assert any(f"{__file__}:{start + n} in " in error.hint for n in range(len(lines))), error.hint
    for ours in ("producer_workers/datasets/records", "buffer/", "files.py", "importlib"):
        assert ours not in error.hint.replace(__file__, "")


@pytest.mark.parametrize("record", ["keys", "values", "exits", "stops", "recurs", "odd"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_record_function_that_raises_names_its_row_and_its_own_frames(
    tmp_path: Path, kind: str, record: str
) -> None:
    section, place = section_of(kind, tmp_path, f"{HERE}:{record}")
    with pytest.raises(DatasetError) as raised:
        read_all(open_here(section, tmp_path))
    assert raised.value.message.startswith(f"{place}: ")
    assert_names_frame(raised.value, fail)


@pytest.mark.parametrize(
    ("factory", "place"),
    [
        ("Numbered", f"{HERE}:Numbered, row 1: KeyError: 'lines'"),
        ("Streamed", f"{HERE}:Streamed, epoch 0, record 1: KeyError: 'lines'"),
        ("broken_factory", "KeyError: 'lines'"),
    ],
)
@pytest.mark.parametrize("opens", [open_here, open_dataset])
def test_a_data_set_that_raises_names_its_row_and_its_own_frames(
    tmp_path: Path, factory: str, place: str, opens: Any
) -> None:
    section = PythonSection(kind="python", factory=f"{HERE}:{factory}")
    with pytest.raises(DatasetError) as raised:
        read_all(opens(section, tmp_path))
    assert place in raised.value.message
    assert_names_frame(raised.value, fail)


def test_a_stream_that_raised_can_be_read_again(tmp_path: Path) -> None:
    dataset = open_here(PythonSection(kind="python", factory=f"{HERE}:Streamed"), tmp_path)
    for _ in range(2):
        assert dataset.row(0).messages[0]["content"] == "one"
        with pytest.raises(DatasetError, match="KeyError"):
            dataset.row(1)


def test_what_is_wrong_with_a_row_itself_names_no_frame(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"answer": 3}')
    with pytest.raises(DatasetError) as raised:
        open_here(JsonlSection(kind="jsonl", path=path), tmp_path)
    assert "raised at" not in raised.value.hint
    assert raised.value.hint != HINT


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        (b"\x1f\x8b\x08\x00", "gunzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh91AY", "bunzip2"),
        (b"\xfd7zXZ\x00", "xz -dk"), (b"PAR1", 'kind = "parquet"'),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_named(tmp_path: Path, start: bytes, hint: str) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(start + b"\xff" * 9)
    with pytest.raises(DatasetError) as raised:
        open_here(JsonlSection(kind="jsonl", path=path), tmp_path)
    assert hint in raised.value.hint
