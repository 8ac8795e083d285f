"""JSONL data sets: what a line may be, and what is said where one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.errors import DatasetError
from producer_workers.datasets.files import JsonlDataset

GOOD = b'{"question": "1+1?", "answer": "2"}'


def dataset(folder: Path, *lines: bytes, end: bytes = b"\n") -> JsonlDataset:
    path = folder / "rows.jsonl"
    path.write_bytes(end.join(lines))
    return JsonlDataset(path)


def test_jsonl_reads_messages_when_given(tmp_path: Path) -> None:
    line = '{"messages": [{"role": "user", "content": "é"}], "ground_truth": [1], "data_source": "s", "n": 3}'
    problem = dataset(tmp_path, line.encode()).row(0)
    assert problem.messages == [{"role": "user", "content": "é"}]
    assert (problem.ground_truth, problem.data_source, problem.extra) == ([1], "s", {"n": 3})


@pytest.mark.parametrize("key", ["prompt", "question"])
def test_jsonl_makes_a_user_message_when_given_a_text(tmp_path: Path, key: str) -> None:
    problem = dataset(tmp_path, f'{{"{key}": "1+1?", "answer": "2", "id": 7}}'.encode()).row(0)
    assert problem.messages == [{"role": "user", "content": "1+1?"}]
    assert (problem.ground_truth, problem.extra) == ("2", {"id": 7})


def test_jsonl_prefers_ground_truth_and_keeps_answer_when_both_are_there(tmp_path: Path) -> None:
    problem = dataset(
        tmp_path, b'{"prompt": "p", "ground_truth": 2, "answer": "long", "extra": {"x": 1}}'
    ).row(0)
    assert (problem.ground_truth, problem.extra) == (2, {"answer": "long", "x": 1})


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n  \n"])
def test_jsonl_finds_every_row_when_lines_end_in_any_way(tmp_path: Path, end: bytes) -> None:
    lines = [f'{{"prompt": "{"x" * n}{n}"}}'.encode() for n in range(50)]
    rows = dataset(tmp_path, *lines, b"", end=end)
    assert len(rows) == 50
    for n in (49, 0, 17):
        assert rows.row(n).messages[0]["content"] == "x" * n + str(n)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b"plain text", "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 13 of the line is 0xff"),
        (b"[1, 2]", "it is a list, not an object"),
        (b"null", "it is null"),
        (b'{"answer": "2"}', "there is no prompt"),
        (b'{"prompt": 3}', '"prompt" is a number, not a string'),
        (b'{"question": "  "}', '"question" is empty'),
        (b'{"prompt": "p", "structured": ["a"]}', '"structured": Input should be'),
        (b'{"prompt": "p", "structured": "yes"}', '"structured": unexpected character'),
        (
            b'{"prompt": "p", "structured": {"choice": []}}',
            '"structured.choice": List should have at least 1 item',
        ),
        (
            b'{"prompt": "p", "structured": {"choices": ["a"]}}',
            '"structured.choices": Extra inputs are not permitted',
        ),
        (
            b'{"prompt": "p", "structured": {"regex": "a", "choice": ["a"]}}',
            '"structured": expected exactly one of',
        ),
        (
            b'{"prompt": "p", "structured": {"regex": "(a"}}',
            '"structured": missing ), unterminated subpattern',
        ),
        (
            b'{"prompt": "p", "structured": {"json_schema": {"a": '
            + b"[" * 40
            + b"]" * 40
            + b"}}}",
            '"structured.json_schema.a[0][0]',
        ),
        (
            b'{"prompt": "p", "answer": ' + b"[" * 40 + b"]" * 40 + b"}",
            '"answer[0][0]',
        ),
        (b'{"prompt": "p", "id": ' + b"9" * 20 + b"}", "the integer 99999999999999999999 has"),
        (b'{"prompt": "p", "id": [-9223372036854775809]}', "the integer -9223372036854775809 has"),
        (b'{"messages": []}', '"messages" is not a list of at least one message'),
        (b'{"messages": "hi"}', '"messages" is not a list'),
        (b'{"messages": ["hi"]}', 'message 0 is not an object with a "role"'),
        (b'{"messages": [{"role": "user"}]}', 'message 0 has no "content"'),
        (b'{"prompt": "a", "data_source": 3}', '"data_source" is a number'),
        (b'{"prompt": "a", "extra": "b"}', '"extra" is a string, not an object'),
    ],
)
def test_jsonl_says_file_line_and_reason_when_a_line_is_wrong(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    with pytest.raises(DatasetError) as caught:
        dataset(tmp_path, GOOD, b"", line, GOOD)
    assert f"rows.jsonl:3: {reason}" in caught.value.message
    assert "expected one JSON" in caught.value.hint or "convert the record" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_jsonl_refuses_a_file_when_it_has_no_rows(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DatasetError, match="has no problems"):
        dataset(tmp_path, content)


def test_jsonl_says_why_when_a_file_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        JsonlDataset(tmp_path / "absent.jsonl")
    with pytest.raises(DatasetError, match="Is a directory"):
        JsonlDataset(tmp_path)


def test_jsonl_refuses_a_row_when_the_file_was_changed(tmp_path: Path) -> None:
    rows = dataset(tmp_path, GOOD)
    rows.path.write_bytes(GOOD + b"\n" + GOOD)
    with pytest.raises(DatasetError, match="was changed while it was in use"):
        rows.row(0)


@pytest.mark.parametrize("row", [-1, 1])
def test_jsonl_raises_index_error_when_there_is_no_such_row(tmp_path: Path, row: int) -> None:
    with pytest.raises(IndexError, match="of 1"):
        dataset(tmp_path, GOOD).row(row)


def test_gsm8k_sample_is_a_data_set_whose_answers_score() -> None:
    from producer_workers.judges.built_in import gsm8k

    rows = JsonlDataset(Path(__file__).parents[3] / "configs" / "data" / "gsm8k_sample.jsonl")
    problems = [rows.row(n) for n in range(len(rows))]
    assert len({problem.messages[0]["content"] for problem in problems}) == 20
    for problem in problems:
        final = problem.ground_truth.rpartition("#### ")[2]
        truth = problem.ground_truth
        assert gsm8k(response=f"So the answer is {final}.", ground_truth=truth)["score"] == 1.0
        assert gsm8k(response="It is -1.", ground_truth=truth)["score"] == 0.0
