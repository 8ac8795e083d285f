from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer.errors import DatasetError
from producer_workers.datasets.files import JsonlDataset
from rolloutmq.extensions.answers.judges import gsm8k

GOOD = b'{"question": "1+1?", "answer": "2"}'


def dataset(folder: Path, *lines: bytes, end: bytes = b"\n") -> JsonlDataset:
    path = folder / "rows.jsonl"
    path.write_bytes(end.join(lines))
    return JsonlDataset(path)


@pytest.mark.parametrize(
    ("line", "content", "truth", "extra"),
    [
        ('{"messages": [{"role": "user", "content": "é"}], "ground_truth": [1], "n": 3}', "é", [1], {"n": 3}),
        ('{"prompt": "1+1?", "answer": "2", "id": 7}', "1+1?", "2", {"id": 7}),
        ('{"question": "1+1?", "answer": "2"}', "1+1?", "2", {}),
        ('{"prompt": "p", "ground_truth": 2, "answer": "long", "extra": {"x": 1}}', "p", 2, {"answer": "long", "x": 1}),
    ],
)  # fmt: skip
def test_a_line_has_messages_or_a_question_and_the_rest_is_extra(
    tmp_path: Path, line: str, content: str, truth: Any, extra: dict[str, Any]
) -> None:
    problem = dataset(tmp_path, line.encode()).row(0)
    assert problem.messages == [{"role": "user", "content": content}]
    assert (problem.ground_truth, problem.extra) == (truth, extra)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n  \n"])
def test_every_row_is_found_when_lines_end_in_any_way(tmp_path: Path, end: bytes) -> None:
    lines = [f'{{"prompt": "{"x" * n}{n}"}}'.encode() for n in range(50)]
    rows = dataset(tmp_path, *lines, b"", end=end)
    assert len(rows) == 50
    for n in (49, 0, 17):
        assert rows.row(n).messages[0]["content"] == "x" * n + str(n)
    for n in (-1, 50):
        with pytest.raises(IndexError, match="of 50"):
            rows.row(n)


DEEP = b"[" * 40 + b"]" * 40


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b"plain text", "not JSON"),
        (b'{"prompt": NaN}', "NaN is no value of JSON"),
        (b'{"prompt": "\xff"}', "byte 0xff in position 12"),
        (b"[1, 2]", "it is a list, not an object"),
        (b"null", "not an object"),
        (b'{"answer": "2"}', "there is no prompt"),
        (b'{"prompt": 3}', '"prompt" is not a text'),
        (b'{"question": "  "}', '"question" is not a text, or empty'),
        (b'{"prompt": "p", "structured": ["a"]}', '"structured": Input should be'),
        (b'{"prompt": "p", "structured": "yes"}', '"structured": unexpected character'),
        (b'{"prompt": "p", "structured": {"choice": []}}', '"structured.choice": List should'),
        (b'{"prompt": "p", "structured": {"choices": ["a"]}}', '"structured.choices": Extra'),
        (b'{"prompt": "p", "structured": {"regex": "a", "choice": ["a"]}}', "exactly one of"),
        (b'{"prompt": "p", "structured": {"regex": "(a"}}', "unterminated subpattern"),
        (b'{"prompt": "p", "structured": {"json_schema": {"a": ' + DEEP + b"}}}", "[0][0]"),
        (b'{"prompt": "p", "answer": ' + DEEP + b"}", '"answer[0][0]'),
        (b'{"prompt": "p", "id": ' + b"9" * 20 + b"}", "more than 64 bits"),
        (b'{"prompt": "p", "id": [-9223372036854775809]}', '"id[0]" is an integer of more'),
        (b'{"prompt": "p", "id": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"messages": []}', '"messages": List should have at least 1'),
        (b'{"messages": "hi"}', '"messages": Input should be a valid list'),
        (b'{"messages": ["hi"]}', '"messages.0": Input should be a valid dict'),
        (b'{"messages": [{"role": "user"}]}', '"messages.0": expected an object with "role"'),
        (b'{"prompt": "a", "data_source": 3}', '"data_source": Input should be'),
        (b'{"prompt": "a", "extra": "b"}', '"extra" is a str, not an object'),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_reason(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    with pytest.raises(DatasetError) as caught:
        dataset(tmp_path, GOOD, b"", line, GOOD)
    assert "rows.jsonl:3: " in caught.value.message
    assert reason in caught.value.message
    assert "convert the record" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DatasetError, match="no records"):
        dataset(tmp_path, content)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        JsonlDataset(tmp_path / "absent.jsonl")
    with pytest.raises(DatasetError, match="Is a directory"):
        JsonlDataset(tmp_path)


def test_gsm8k_sample_is_a_data_set_whose_answers_score() -> None:
    rows = JsonlDataset(Path(__file__).parents[3] / "configs" / "data" / "gsm8k_sample.jsonl")
    problems = [rows.row(n) for n in range(len(rows))]
    assert len({problem.messages[0]["content"] for problem in problems}) == 20
    for problem in problems:
        truth = problem.ground_truth
        final = truth.rpartition("#### ")[2]
        assert gsm8k(response=f"So the answer is {final}.", ground_truth=truth)["score"] == 1.0
        assert gsm8k(response="It is -1.", ground_truth=truth)["score"] == 0.0
