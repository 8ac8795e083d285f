"""Values of rows: what `check` accepts, a worker reads back; what it refuses, it names."""

from __future__ import annotations

import datetime as dt
import enum
import json
import uuid
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from buffer.errors import DatasetError
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.files import JsonlDataset, ParquetRows
from producer_workers.datasets.records import RecordsDataset, load_to_problem, problem_of
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from rolloutmq.check import data as check_data
from rolloutmq.check.contained import units_of
from rolloutmq.check.finding import Finding
from rolloutmq.config.load import inspect_config
from tests.pipeline.yard import TASK, Letters, Yard
from tests.servers import KINDS

pd: Any = import_module("pandas")
HERE = "tests.pipeline.test_row_values"


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Own:
    """A class of a user's."""


NOON = dt.datetime(2026, 5, 1, 12, 0, 0, 250, dt.UTC)
ID = uuid.UUID(int=7)
KEPT: dict[str, tuple[Any, Any]] = {
    "text": ("é\n", "é\n"),
    "numbers": (
        [0, -(2**63), 2**64 - 1, 0.5, True, None],
        [0, -(2**63), 2**64 - 1, 0.5, True, None],
    ),
    "bytes": (b"\x00\xff", b"\x00\xff"),
    "bytearray": (bytearray(b"ab"), b"ab"),
    "aware time": (NOON, "2026-05-01T12:00:00.000250+00:00"),
    "date": (dt.date(2026, 5, 1), "2026-05-01"),
    "time of day": (dt.time(7, 5), "07:05:00"),
    "duration": (dt.timedelta(days=1, microseconds=5), "P1DT0.000005S"),
    "nanoseconds": (pd.Timestamp(1, unit="ns"), "1970-01-01T00:00:00.000000001"),
    "no time": (pd.NaT, None),
    "decimal": (Decimal("12.50"), "12.50"),
    "small decimal": (Decimal("1E-12"), "0.000000000001"),
    "fraction": (Fraction(1, 3), "1/3"),
    "uuid": (ID, str(ID)),
    "path": (Path("a/b"), "a/b"),
    "enumeration": ([Colour.RED, Level.HIGH], ["red", 3]),
    "numpy scalars": (
        [np.int64(4), np.float32(0.5), np.bool_(True), np.str_("s"), np.bytes_(b"b")],
        [4, 0.5, True, "s", b"b"],
    ),
    "numpy dates": (
        np.array(["2026-05-01T01:02:03.000000004", "NaT"], "M8[ns]"),
        ["2026-05-01T01:02:03.000000004", None],
    ),
    "array": (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    "array of objects": (np.array([{"a": (1,)}, Decimal(2)], object), [{"a": [1]}, "2"]),
    "array without dimensions": (np.array(5), 5),
    "tensor": (torch.tensor([[1.5, 2.0]]), [[1.5, 2.0]]),
    "tuple": ((1, (2,)), [1, [2]]),
    "set": ({"b", "a"}, ["a", "b"]),
    "object": (OrderedDict(a={"b": (1,)}), {"a": {"b": [1]}}),
    "deep": (json.loads("[" * 29 + "]" * 29), json.loads("[" * 29 + "]" * 29)),
}
REFUSED: dict[str, Any] = {
    "long integer": 2**64, "very long integer": -(10**9000), "half of a pair": "a\ud800",
    "half of a pair in a key": {"\udfff": 1}, "key that is a number": {1: "a"},
    "object of a class": Own(), "function": print, "set without order": {"a", 1}, "complex": 1j,
    "complex array": np.array([1j]), "longer float": np.longdouble("0.1"),
    "duration without a unit": np.timedelta64(5, "ns"), "too deep": json.loads("[" * 40 + "]" * 40),
    "named fields": np.zeros(1, [("a", "i4")]),
}  # fmt: skip
PARQUET = {
    "timestamp": (pa.array([NOON], pa.timestamp("us", "UTC")), "2026-05-01T12:00:00.000250+00:00"),
    "date": (pa.array([dt.date(2026, 5, 1)]), "2026-05-01"),
    "decimal": (pa.array([Decimal("12.50")], pa.decimal128(9, 2)), "12.50"),
    "duration": (pa.array([dt.timedelta(seconds=1)], pa.duration("us")), "PT1S"),
    "list of times": (pa.array([[NOON.replace(tzinfo=None)]]), ["2026-05-01T12:00:00.000250"]),
    "unsigned": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "binary": (pa.array([b"\xff"]), b"\xff"),
}
given: Any = None


def give(record: Any) -> Any:
    return {**record, "answer": given, "meta": {"deep": [given]}}


def in_memory(folder: Path, value: Any) -> Dataset:
    rows = [{"question": "one"}, give({"question": "two"})]
    return RecordsDataset(rows, "in memory", problem_of)


def jsonl(folder: Path, value: Any) -> Dataset:
    (folder / "rows.jsonl").write_text('{"question": "one"}', encoding="utf-8")
    return JsonlDataset(folder / "rows.jsonl", load_to_problem(f"{HERE}:give"))


def parquet_rows(folder: Path, value: Any) -> Dataset:
    parquet.write_table(pa.table({"question": ["one", "two"]}), folder / "rows.parquet")
    rows = ParquetRows(folder / "rows.parquet")
    return RecordsDataset(rows, "rows", load_to_problem(f"{HERE}:give"), rows.name_row)


SOURCES = [in_memory, jsonl, parquet_rows]


def sampled(dataset: Dataset, tokenizer: Tokenizer | None = None) -> Sampler:
    return Sampler(
        TASK, dataset, tokenizer or Letters(), SampleParams(), prompt_repeat_k=2, shuffle=False
    )


def read_back(dataset: Dataset) -> RolloutGroup:
    """Return the last row as a worker reads it."""
    sampler = sampled(dataset)
    draw = len(dataset) - 1
    states = sampler.draw(draw)
    assert isinstance(states, list)
    return group_bytes.decode(sampler.encode(draw, states))


@pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", KEPT)
def test_a_kept_value_is_read_back_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, name: str
) -> None:
    value, expected = KEPT[name]
    monkeypatch.setitem(globals(), "given", value)
    state = read_back(source(tmp_path, value)).states[1]
    assert state.ground_truth == expected
    assert state.extra["meta"] == {"deep": [expected]}


@pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_value_is_named_with_its_row_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, name: str
) -> None:
    monkeypatch.setitem(globals(), "given", REFUSED[name])
    with pytest.raises(DatasetError) as raised:
        read_back(source(tmp_path, REFUSED[name]))
    place = {
        "in_memory": "in memory, row 1",
        "parquet_rows": f"{tmp_path / 'rows.parquet'}, row 0",
    }.get(source.__name__, f"{tmp_path / 'rows.jsonl'}:1")
    assert raised.value.message.startswith(f'{place}: "answer')
    assert "`record` function" in raised.value.hint


@pytest.mark.parametrize("name", PARQUET)
def test_columns_of_parquet_are_read_back_equal(tmp_path: Path, name: str) -> None:
    column, expected = PARQUET[name]
    table = pa.table({"question": ["one"], "answer": column, "when": column})
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = ParquetRows(tmp_path / "rows.parquet")
    state = read_back(RecordsDataset(rows, "rows", problem_of, rows.name_row)).states[0]
    assert (state.ground_truth, state.extra["when"]) == (expected, expected)


def every_row() -> list[Any]:
    """All rows: kept ones first."""
    kept = [{"question": name, "answer": value} for name, (value, _) in KEPT.items()]
    return kept + [{"question": name, "answer": value} for name, value in REFUSED.items()]


@pytest.mark.parametrize("make_yard", KINDS[:1], indirect=True)
def test_what_a_check_accepts_is_enqueued_and_what_it_refuses_stops_the_task(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(
        f"""
        run = {{ name = "mine" }}
        plan = {{ steps = 1, batch_size = 1 }}
        engine = {{ kind = "simulated" }}
        [tasks.{TASK}]
        judge = "{HERE}:every_row"
        shuffle = false
        [tasks.{TASK}.dataset]
        kind = "python"
        factory = "{HERE}:every_row"
        """,
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_data, "SHOWN", 100)
    loaded, problems = inspect_config(config, [])
    assert problems == []
    found: list[Finding] = []
    for unit in units_of("data", loaded):
        if unit.section == "data":
            found += unit.findings()
    errors = [each.what for each in found if each.level == "error"]
    assert len(errors) == len(REFUSED)
    for number, what in enumerate(errors, start=len(KEPT)):
        assert f'every_row, row {number}: "answer' in what

    sampler = sampled(RecordsDataset(every_row(), "rows", problem_of))
    limits = yard.run.limits.model_copy(update={"batch_size": len(KEPT) + 1, "steps": 1})
    yard.run.limits.adopt(limits)
    strategies = strategies_of(yard.run.limits)
    for rows in (len(KEPT), 1):
        producer = Producer(yard.run, {TASK: sampler}, strategies, slice_size=rows)
        yard.run.control.open_producer(producer.nonce, take_over=True)
        producer.round(yard.run.control.state())
    assert yard.stages() == {"waiting": len(KEPT)}
    stop = yard.run.task_stops.of(TASK)
    assert stop.kind == "broken"
    assert f"row {len(KEPT)}" in stop.reason
    assert "rolloutmq dead" not in stop.fix(TASK)
