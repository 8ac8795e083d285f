from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from torch.utils.data import DataLoader, Dataset, IterableDataset

from buffer.errors import ConfigError, DatasetError
from buffer.wire.sampling import SampleParams
from producer_workers.config.dataset import (
    FieldName,
    HuggingFaceSection,
    JsonlSection,
    ParquetSection,
    PythonSection,
)
from producer_workers.datasets.open import open_dataset, open_here
from producer_workers.datasets.records import RecordsDataset, StreamDataset, load_to_problem
from producer_workers.producer.sampler import Sampler
from tests.producer_workers.datasets import forms
from tests.producer_workers.datasets.forms import to_problem
from tests.thoroughness import examples

ROWS = 10
HERE = "tests.producer_workers.datasets.test_datasets"


def record(number: int) -> dict[str, Any]:
    return {"question": f"q{number}", "answer": str(number), "level": number}


class MapStyle(Dataset[dict[str, Any]]):
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return record(row)


class Stream(IterableDataset[dict[str, Any]]):
    passes = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.passes += 1
        return map(record, range(ROWS))


def keep(batch: list[Any]) -> list[Any]:
    return batch


def make_loader(
    batch_size: int = 3, workers: int = 0, own_generator: bool = True
) -> DataLoader[Any]:
    generator = torch.Generator() if own_generator else None
    return DataLoader(
        MapStyle(),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=keep,
        generator=generator,
    )


def endless(start: int) -> Iterator[dict[str, Any]]:
    return map(record, range(start, start + ROWS))


def asked(dataset: Any, tokenizer: Any, draws: range) -> list[str]:
    sampler = Sampler("math", dataset, tokenizer, SampleParams(), shuffle=False)
    groups = [sampler.draw(draw) for draw in draws]
    return [str(group[0].messages[0]["content"]) for group in groups if isinstance(group, list)]


def python(factory: str, tmp_path: Path, **section: Any) -> Any:
    made = PythonSection(kind="python", factory=f"{HERE}:{factory}", **section)
    return open_here(made, tmp_path, seed=5)


def test_parquet_reads_any_row_of_any_file_in_a_folder(tmp_path: Path) -> None:
    for file in range(3):
        rows = [record(10 * file + n) for n in range(10)]
        parquet.write_table(
            pa.Table.from_pylist(rows), tmp_path / f"part-{file}.parquet", row_group_size=4
        )
    dataset = open_dataset(ParquetSection(kind="parquet", path=tmp_path), tmp_path)
    assert len(dataset) == 30
    for row in (29, 0, 3, 4, 10, 17, 9):
        problem = dataset.row(row)
        assert (problem.messages[0]["content"], problem.ground_truth, problem.extra) == (
            f"q{row}",
            str(row),
            {"level": row},
        )


def test_parquet_says_which_file_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DatasetError, match=r"bad\.parquet: cannot be read as Parquet"):
        open_dataset(ParquetSection(kind="parquet", path=tmp_path), tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DatasetError, match=r"no \*\.parquet files"):
        open_dataset(ParquetSection(kind="parquet", path=tmp_path / "none"), tmp_path)


def test_record_function_makes_problems_of_another_form(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    parquet.write_table(pa.Table.from_pylist([{"problem": "1+1", "solution": "2"}]), path)
    with pytest.raises(DatasetError, match=r"row 0: there is no prompt"):
        open_dataset(ParquetSection(kind="parquet", path=path), tmp_path)
    section = ParquetSection(kind="parquet", path=path, record=f"{forms.__name__}:from_other_form")
    assert open_dataset(section, tmp_path).row(0).ground_truth == "2"
    wrong = ParquetSection(kind="parquet", path=path, record=f"{forms.__name__}:to_problem")
    with pytest.raises(DatasetError, match="row 0: KeyError: 'question'"):
        open_dataset(wrong, tmp_path)


def test_hugging_face_folder_is_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([record(n) for n in range(ROWS)])
    datasets.DatasetDict({"train": rows, "test": rows.select([7])}).save_to_disk(
        str(tmp_path / "both")
    )
    section = HuggingFaceSection(kind="hugging_face", path=tmp_path / "both", split="test")
    assert open_dataset(section, tmp_path).row(0).messages[0]["content"] == "q7"
    with pytest.raises(ConfigError, match="no split None"):
        open_dataset(section.model_copy(update={"split": None}), tmp_path)
    with pytest.raises(DatasetError, match="nothing"):
        open_dataset(section.model_copy(update={"path": tmp_path / "nothing"}), tmp_path)


# torch warns of more processes than cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loader_gives_each_draw_the_same_prompt_after_a_restart(
    tmp_path: Path, tokenizer: Any, workers: int
) -> None:
    make: Callable[[], Any] = lambda: python("make_loader", tmp_path, options={"workers": workers})  # noqa: E731
    section = PythonSection(
        kind="python", factory=f"{HERE}:make_loader", options={"workers": workers}
    )
    # in a process of its own, as a producer opens it: some rows at a time
    whole = asked(open_dataset(section, tmp_path, seed=5), tokenizer, range(2 * ROWS + 3))
    first = whole[:ROWS]
    second = whole[ROWS : 2 * ROWS]
    assert sorted(first) == sorted(second) == sorted(f"q{n}" for n in range(ROWS))
    assert first != second
    for start in (1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS):  # the end of an epoch included
        assert asked(make(), tokenizer, range(start, 2 * ROWS + 3)) == whole[start:]


KINDS: dict[str, Callable[[Path], Any]] = {
    "rows": lambda _: RecordsDataset(MapStyle(), "rows", to_problem),
    "loader": lambda folder: python("make_loader", folder),
    "stream": lambda _: StreamDataset(Stream(), "stream", to_problem),
}


WHOLE: dict[tuple[str, bool], list[list[Any]]] = {}
"""What an undisturbed run draws, three epochs and more, by kind and shuffle."""


def drawn(sampler: Sampler, draw: int) -> list[Any]:
    group = sampler.draw(draw)
    assert isinstance(group, list)
    return [
        (s.index, s.messages, s.ground_truth, s.extra, s.sample_params.seed, str(s.prompt_ids))
        for s in group
    ]


@pytest.mark.parametrize(
    ("kind", "shuffle"), [("rows", True), ("rows", False), ("loader", False), ("stream", False)]
)
@settings(max_examples=examples(40))
@given(producers=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
def test_draws_are_those_of_an_undisturbed_run_wherever_producers_die(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Any,
    kind: str,
    shuffle: bool,
    producers: list[tuple[int, int]],
) -> None:
    """Let producers enqueue some draws, draw some ahead, and die.

    The next one continues from what was enqueued.
    """
    folder = tmp_path_factory.getbasetemp()

    def start() -> Sampler:
        params = SampleParams(seed=1)
        return Sampler(
            "math", KINDS[kind](folder), tokenizer, params, prompt_repeat_k=2, shuffle=shuffle
        )

    if (kind, shuffle) not in WHOLE:
        undisturbed = start()
        WHOLE[kind, shuffle] = [drawn(undisturbed, draw) for draw in range(6 * 8 + 6 + 1)]
    cursor = 0
    for enqueued, ahead in [*producers, (0, 1)]:
        sampler = start()
        for draw in range(cursor, cursor + enqueued + ahead):
            assert drawn(sampler, draw) == WHOLE[kind, shuffle][draw]
        cursor += enqueued


def test_stream_is_not_iterated_before_the_first_draw_and_goes_back_cheaply(tokenizer: Any) -> None:
    stream = Stream()
    dataset = StreamDataset(stream, "stream", to_problem)
    assert stream.passes == 0
    assert asked(dataset, tokenizer, range(4, 8)) == ["q4", "q5", "q6", "q7"]
    assert asked(dataset, tokenizer, range(5, 9)) == ["q5", "q6", "q7", "q8"]
    assert stream.passes == 1
    assert asked(dataset, tokenizer, range(ROWS - 1, ROWS + 2)) == ["q9", "q0", "q1"]
    assert stream.passes == 2


def test_loader_that_shuffles_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="shuffles anew each time"):
        python("make_loader", tmp_path, options={"own_generator": False})


@pytest.mark.parametrize(
    ("rows", "error"), [(None, "has no length"), (ROWS + 1, f"ended after {ROWS} of {ROWS + 1}")]
)
def test_stream_without_a_true_length_is_refused(
    tmp_path: Path, rows: int | None, error: str, tokenizer: Any
) -> None:
    open_it = partial(python, "endless", tmp_path, options={"start": 0}, rows=rows)
    with pytest.raises(DatasetError, match=error):
        asked(open_it(), tokenizer, range(ROWS + 1))


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text('{"problem": "1 + 1", "solution": "2", "answer": "two"}\n', encoding="utf-8")
    fields: dict[FieldName, str] = {"question": "problem", "answer": "solution"}
    opened = open_dataset(JsonlSection(kind="jsonl", path=path, fields=fields), tmp_path)
    problem = opened.row(0)
    assert problem.messages == [{"role": "user", "content": "1 + 1"}]
    assert (problem.ground_truth, problem.extra) == ("2", {})
    with pytest.raises(DatasetError, match='there is no "task", which `fields` names for "prompt"'):
        open_dataset(JsonlSection(kind="jsonl", path=path, fields={"prompt": "task"}), tmp_path)


def take_apart(row: Any) -> dict[str, Any]:
    """Make a problem as many functions do: what is used is taken out of the record."""
    question = row.pop("text")
    row["about"]["seen"] = True
    return {"question": question["q"].pop(), "answer": row.pop("answer"), "about": row["about"]}


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_record_function_may_change_its_record(kind: str) -> None:
    """A data set in memory returns the same record again, in a later epoch or after a restart."""
    rows = [{"text": {"q": [f"{n}?"]}, "answer": [n], "about": {}} for n in range(3)]
    before = orjson.dumps(rows)
    change = load_to_problem(f"{HERE}:take_apart")
    if kind == "rows":
        data: Any = RecordsDataset(rows, "rows", change)
    else:
        data = StreamDataset(rows, "stream", change)
    drawn = [[data.row(row, epoch) for row in (0, 1, 2, 0)] for epoch in range(2)]
    assert drawn[0] == drawn[1]
    assert orjson.dumps(rows) == before
