from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyarrow import parquet

from buffer.errors import DatasetError
from buffer.wire.sampling import SampleParams
from producer_workers.config import dataset as sections
from producer_workers.config.dataset import (
    LARGEST_ROW,
    HuggingFaceSection,
    ImagesSection,
    JsonlSection,
    ParquetSection,
    PythonSection,
)
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.open import open_here
from producer_workers.datasets.records import RecordsDataset, problem_of
from producer_workers.producer import sampler
from producer_workers.producer.sampler import Sampler, TooLong

HERE = "tests.producer_workers.datasets.test_row_limits"

Rows = list[dict[str, Any]]


def as_jsonl(folder: Path, rows: Rows) -> Any:
    (folder / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return JsonlSection(kind="jsonl", path=folder / "rows.jsonl")


def as_parquet(folder: Path, rows: Rows) -> Any:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return ParquetSection(kind="parquet", path=folder / "rows.parquet")


def as_saved_by_datasets(folder: Path, rows: Rows) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return HuggingFaceSection(kind="hugging_face", path=folder / "saved")


def as_list(folder: Path, rows: Rows) -> Any:
    return PythonSection(kind="python", factory=f"{HERE}:given", options={"rows": rows})


def as_stream(folder: Path, rows: Rows) -> Any:
    options = {"rows": rows}
    return PythonSection(kind="python", factory=f"{HERE}:streamed", options=options, rows=len(rows))


def given(rows: Rows) -> Rows:
    return rows


def streamed(rows: Rows) -> Iterator[dict[str, Any]]:
    return iter(rows)


KINDS = [as_jsonl, as_parquet, as_saved_by_datasets, as_list, as_stream]


@pytest.mark.parametrize("write", KINDS)
def test_a_row_over_the_limit_is_refused_by_its_size_and_named(
    write: Callable[[Path, Rows], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "LARGEST_ROW", 1000)
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "é" * 600, "answer": "2"}]
    section = write(tmp_path, rows)
    with pytest.raises(DatasetError, match=r"(row |record |:)[12].* has more than 1000 B"):
        open_here(section, tmp_path).row(1)
    monkeypatch.setattr(sections, "LARGEST_ROW", 1500)
    assert open_here(write(tmp_path, rows), tmp_path).row(1).ground_truth == "2"


def test_a_row_may_have_its_images(tmp_path: Path) -> None:
    section = as_jsonl(tmp_path, [{"question": "1+1?"}])
    assert section.largest_row == LARGEST_ROW
    images = ImagesSection(max_images=2, max_bytes=3000)
    assert section.model_copy(update={"images": images}).largest_row == LARGEST_ROW + 8000


def test_no_more_of_a_line_is_read_than_a_row_may_have(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "1+1?"}\n')
    with path.open("ab") as file:
        file.truncate(40 * LARGEST_ROW)  # the rest is one line of zeros, without blocks on the disk
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match=r"rows\.jsonl:2: the row has more than"):
            open_here(JsonlSection(kind="jsonl", path=path), tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 * LARGEST_ROW
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tokens", [None, 10])
def test_a_prompt_over_the_limit_is_skipped_before_it_is_encoded(
    tokenizer: Any, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "LONGEST_PROMPT", 160)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", None)
    tools = [{"function": {"name": "f", "parameters": {"x" * 150: 1}}}]
    rows = [{"question": "é" * 80}, {"question": "x", "tools": tools}]
    draws = Sampler(
        "math",
        RecordsDataset(rows, "rows", problem_of),
        tokenizer,
        SampleParams(),
        shuffle=False,
        max_prompt_tokens=tokens,
    )
    assert [draws.draw(n) for n in range(2)] == [TooLong(n, draws.place(n)) for n in range(2)]


# -- keys that a table adds -----------------------------------------------------------------------

FUNCTIONS: Rows = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": has}},
    }
    for name, has in {"f": {"a": {"type": "string"}}, "g": {"b": {"type": "number"}}}.items()
]
MESSAGES: Rows = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "1"}}}]},
    {"role": "tool", "content": "t", "name": "f"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "g", "arguments": {"b": 2}}}]},
    {"role": "tool", "content": "t", "name": "g"},
]  # fmt: skip


@pytest.mark.parametrize("write", [as_parquet, as_saved_by_datasets])
def test_null_keys_of_a_table_reach_neither_tools_nor_messages(
    write: Callable[[Path, Rows], Any], tmp_path: Path
) -> None:
    rows = [
        {"messages": MESSAGES, "tools": FUNCTIONS[n:], "meta": {"k": None, "l": n}}
        for n in range(2)
    ]
    dataset = open_here(write(tmp_path, rows), tmp_path)
    assert [dataset.row(n).tools for n in range(2)] == [FUNCTIONS, FUNCTIONS[1:]]
    expected: list[Any] = [dict(message) for message in MESSAGES]
    expected[1]["content"] = ""
    assert dataset.row(0).messages == expected
    assert dataset.row(0).extra["meta"] == {"k": None, "l": 0}, "these are for the judge"


def test_null_in_a_message_is_no_text(tmp_path: Path) -> None:
    """A chat template would write "None"."""
    messages = [{"role": "user", "content": None, "name": None}]
    rows = [{"messages": messages, "tools": [{"default": None}]}]
    problem = open_here(as_jsonl(tmp_path, rows), tmp_path).row(0)
    assert problem.messages == [{"role": "user", "content": ""}]
    assert problem.tools == [{"default": None}], "what JSON says of a schema stays"


@pytest.mark.parametrize("place", ["top", "deep"])
def test_a_key_that_is_written_twice_is_refused(tmp_path: Path, place: str) -> None:
    """Which of the two values counts would be the parser's choice."""
    lines = {
        "top": '{"question": "1+1?", "answer": "2", "answer": "3"}',
        "deep": '{"question": "1+1?", "meta": [{"answer": 1, "a": 2, "answer": 1}]}',
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(lines[place])
    section = JsonlSection(kind="jsonl", path=path)
    with pytest.raises(DatasetError, match=r"rows\.jsonl:1: .*the key 'answer' is written twice"):
        open_here(section, tmp_path)


# -- files that are no data -----------------------------------------------------------------------


def with_litter(folder: Path) -> Dataset:
    """Return the rows of a folder as macOS, editors and broken copies leave it."""
    as_parquet(folder, [{"question": "1+1?"}])
    (folder / "._rows.parquet").write_bytes(b"\0\5\x16\7")
    (folder / ".hidden.parquet").mkdir()
    (folder / "gone.parquet").symlink_to(folder / "nowhere.parquet")
    return open_here(ParquetSection(kind="parquet", path=folder), folder)


def test_hidden_files_and_dangling_links_of_a_folder_stop_no_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(with_litter(tmp_path)) == 1
    assert "gone.parquet" in caplog.text, "a link that leads nowhere is told"
    assert "._rows" not in caplog.text
